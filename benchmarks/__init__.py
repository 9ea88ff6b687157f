"""Measurements, kept apart from the package: nothing in lossycoll imports them.

- ``studies/``: what takes minutes to hours and is resumed where it was stopped. A study is its
  pieces as data (cells.py, runs.py, matrix.py, ...), what measures one (measure.py, and rank.py in
  each rank), its report (report.py, plot.py), and study.py with the
  :class:`benchmarks.common.runner.Study` of them that ``python -m benchmarks NAME`` runs.
  Results are lines of results.jsonl.
- ``theory/``: the formulas of docs/theory.md and docs/dropcompute.md beside what is measured.
- ``micro/``: programs that answer one question in seconds, some of them in C.
- ``common/``: results on disk, the runner, reports, laboratory jobs, TCP's congestion control.

``make study NAME=quality`` runs one; ``make reports`` writes tables and plots of what there is.
"""
