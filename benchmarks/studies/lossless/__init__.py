"""Collectives on wires that lose nothing: this backend beside gloo and beside bare sockets."""
