"""Interfaces, sockets and their buffers."""
