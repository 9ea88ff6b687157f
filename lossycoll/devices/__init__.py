"""Tensors that lie on a device: their way to host memory, where the engine works, and back.

``layer.py`` says what a device has to offer, ``cuda.py`` does it with CUDA, and ``bounce.py`` is
the way of one call. docs/devices.md has the picture.
"""
