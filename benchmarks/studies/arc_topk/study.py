"""ARC-Top-K beside dense sums, PowerSGD and Top-K: ``python -m benchmarks arc_topk
--report docs``.

The compressor's own time; the energy that forms of matrices keep; a step of DDP on links of 100 and
1000 Mbit/s; what is learned at 100 Mbit/s, clean and at 10% loss. The last two need the laboratory
(``lossycoll lab check``). ``--only kind=long``: what is learned in 2,000 steps, beside PowerSGD in
as many bytes; an hour, without the laboratory.
"""

from __future__ import annotations

from benchmarks.common.runner import Study, batch_by_batch

from .cells import batches, cells
from .measure import measure

STUDY = Study(
    name="arc_topk",
    description=__doc__,
    plan=lambda options: list(cells()),
    measuring=batch_by_batch(measure),
    batches=batches,
    alike=lambda cell: cell.kind,
    report_help="folder of arc_topk.md, for tables and plots",
)
