"""ARC-Top-K: sparse gradients through an all-reduce without indices (docs/arc_topk.md).

``arc_topk`` is what users construct. ``step`` has its arguments, and compresses and averages one
bucket: ``selection`` says which rows are sent, ``error_memory`` keeps what was not delivered.
"""
