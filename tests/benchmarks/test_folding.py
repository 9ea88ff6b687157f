"""The study of folding compares what stands for all with all."""

from __future__ import annotations

from benchmarks.common.results import Result
from benchmarks.studies.folding.study import NETWORKS, Cell, cells, compared, line


def test_each_cell_has_one_with_all_hosts_to_compare_with() -> None:
    planned = cells([8, 16], [8])
    assert len(set(planned)) == len(planned) == 3 * 2 * len(NETWORKS)
    assert all(Cell(one.hosts, one.hosts, one.algorithm, one.network) in planned for one in planned)


def test_the_error_is_of_medians() -> None:
    def result(whole: int, seconds: float) -> Result:
        figures = {"seconds": [seconds, 9.0, 0.001], "missing": [0.0, 0.0, 0.03], "cpu": 1.0}
        return Result(Cell(16, whole, "ring", "clean").settings, figures)

    (row,) = compared([result(16, 0.2), result(8, 0.19)])
    assert line(row) == ["16, 8", "ring", "clean", "200", "190", "-5.0%", "1.00%", "1.00%"]
