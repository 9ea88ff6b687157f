"""ShardedOptimizer: each rank owns a shard of the parameters and of the optimizer's state.

optimizer is the class, settings what it is given. parameter_store has the buckets, as far as
eligibility lets parameters in. gradient_reducer sends gradients, compressed if asked; backward_pass
has the pass's state and the norm. parameter_sync sends parameters, for which module_waits has a
model's modules wait. checkpoint saves and loads, backup keeps each shard twice.
"""
