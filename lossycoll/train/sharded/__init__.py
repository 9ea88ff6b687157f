"""ShardedOptimizer: each rank owns a shard of the parameters and of the optimizer's state.

optimizer is the class; settings and refusals what it is given and says. parameter_store has the
buckets (shard), as far as eligibility lets them in. gradient_reducer sends gradients, of which
backward_pass has the state and scaling the norm, or compression sends them; parameter_sync sends
parameters, for which module_waits has a model's modules wait. checkpoint saves and loads, backup
keeps each shard twice.
"""
