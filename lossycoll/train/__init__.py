"""Additions to a training script, beyond the name of the backend: one package for each method.

sharded has ShardedOptimizer, drift DriftBound and measure_drift, dropcompute DropCompute, compress
ARC-Top-K, hooks the communication hooks of DDP. They stand on common, the only way to send.

The registry of training methods that the demo and the study of quality compare isn't here but in
:mod:`lossycoll.cli.demo.methods`.
"""
