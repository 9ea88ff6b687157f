"""ShardedOptimizer: each rank owns a shard of the parameters and of the optimizer's state."""
