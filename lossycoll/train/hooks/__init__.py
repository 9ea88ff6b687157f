"""Communication hooks for DistributedDataParallel, one in each module.

``dispersing`` interleaves a bucket's elements over the packets; ``arc_topk`` compresses buckets by
train/compress.
"""
