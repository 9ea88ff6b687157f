"""Sparse gradients through an all-reduce without indices (docs/arc_topk.md)."""
