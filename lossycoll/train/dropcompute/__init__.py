"""DropCompute: stop a late rank's micro-batches and average what is done (docs/dropcompute.md).

``controller`` takes a step from its start to the averaged gradients. ``loop`` hands out
micro-batches, ``threshold`` has the arguments and decides when to stop, ``averaging`` says how
gradients are averaged, ``report`` has steps as data.
"""
