"""ARC-Top-K: sparse gradients through an all-reduce without indices (docs/arc_topk.md).

``arc_topk`` is what users construct. ``step`` has its arguments and compresses one bucket:
``selection`` says which rows are sent, ``transport`` sends them, ``error_memory`` keeps what was
not delivered, of each gradient and of all between steps.
"""
