"""ARC-Top-K beside dense all-reduces, PowerSGD and Top-K: time, bytes, and what is learned."""
