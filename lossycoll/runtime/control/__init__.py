"""The control plane's transport: sealed messages between processes, by ZeroMQ."""
