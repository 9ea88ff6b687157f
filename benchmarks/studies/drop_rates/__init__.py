"""What a model learns when DropCompute drops so many micro-batches, by divisor."""
