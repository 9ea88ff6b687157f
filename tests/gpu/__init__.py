"""What a machine with a GPU has to show: two ranks that share GPU 0, over real sockets.

``make test-gpu`` runs it, or ``python3 -m pytest tests/gpu``. The checks are in tables, each run by
one start of its ranks (runner.py); a test reads what became of one check. Without a GPU all of that
is skipped, and the tables that can do without one run on CPU tensors (test_on_cpu.py): so what they
want is known to be right.
"""
