"""ShardedOptimizer: each rank owns a shard of the parameters and of the optimizer's state.

optimizer is the class; settings, model_groups, stats and refusals what it is given and says.
parameter_store has the buckets (shard), as far as eligibility and elementwise_probe let them in.
gradient_reducer sends gradients (backward_pass, reducer_order, error_feedback, compression);
parameter_sync sends parameters (undelivered), for which module_waits has a model's modules wait;
checkpoint saves and loads.
"""
