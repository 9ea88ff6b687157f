"""The native engine as Python sees it: the only package that knows its library."""
