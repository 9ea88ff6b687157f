"""docs/conformance.md, from the results of whole runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from benchmarks.common.tables import Table

from .exceptions import EXCEPTIONS
from .modes import CHOICES, MODES
from .verdict import Run, contradictions

Results = Mapping[tuple[str, int], Run]
"""By mode and world size, of one choice of tests."""

KINDS = ("pass", "fail", "timeout", "skip")

_HEAD = """\
# Conformance

Look up which of torch's own tests for backends lossy and gloo pass, and why lossy fails the rest.
The tests are those of `DistributedTest._DistTestBase` in
`torch.testing._internal.distributed.distributed_test`. Each ran against gloo and against lossy, in
ranks of its own on one machine. `make conformance` repeats them and writes this page. It fails if a
result contradicts the [exceptions](#exceptions).

{facts}

## How lossy runs gloo's tests

- The suite decides by the backend's name which tests to run, when it is imported. It is imported as
  for gloo, so lossy runs every test that gloo has to pass. Then the backend is set to lossy. Tests
  that gloo skipped (no CUDA, another backend's test) are not started again.
- A few tests choose their branch for CPUs by `BACKEND == "gloo"` while they run. They get lossy's
  name in a form that compares equal to gloo's. torch itself gets the plain name.
- torch has a fixed list of backends whose profiler events are checked. The suite omits those
  assertions for lossy, whose spans have names of their own.
- Ranks are forked from a process that has imported torch and has a single thread. Otherwise they
  run as torch runs them: a file store, the suite's own barrier before and after, the same seed. All
  ranks must end alike; torch checks only the first rank's exit status.
"""


_MORE = """\
## More tests, which torch doesn't run for gloo

{meanings}

Gloo and lossy ran these as well. Where gloo fails, lossy need not pass.
"""


_VERSIONS = "## torch's versions\n"

BY_TORCH = Table(
    "conformance.md",
    "conformance by torch",
    "torch | mode | ranks | gloo passes | lossy passes too | engine operations | "
    "packets lost on purpose",
    keys=3,
)
"""Counts of what torch chooses for gloo, with each version that was installed in a run."""


def rows_by_torch(torch: str, results: Results) -> list[tuple[str, ...]]:
    """Rows of :data:`BY_TORCH`, of one run with one version."""
    rows = []
    for (mode, world), run in sorted(
        results.items(), key=lambda item: list(MODES).index(item[0][0])
    ):
        if MODES[mode].backend != "lossy":
            continue
        passed = {test for test, out in results["gloo", world].items() if out.kind == "pass"}
        both = sum(run[test].kind == "pass" for test in passed if test in run)
        counters: Counter[str] = Counter()
        for outcome in run.values():
            counters.update(outcome.counters)
        cells = (len(passed), both, counters["operations"], counters["packets_injected"])
        rows.append((torch, mode, f"{world}", *(f"{cell:,}" for cell in cells)))
    return rows


def versions_of(text: str) -> str:
    """The part of a page that is written by hand: what ran with which version of torch."""
    _, heading, rest = text.partition(_VERSIONS)
    return heading + rest.partition("\n## ")[0]


def page(choices: Mapping[str, Results], facts: Iterable[str], versions: str = "") -> str:
    """The whole page, from the results of each choice.

    ``facts``: lines on when, where and with what it was measured. ``versions``: what
    :func:`versions_of` has kept of the page as it was.
    """
    results = choices["gloo"]
    more = {name: found for name, found in choices.items() if name != "gloo"}
    parts = [
        _HEAD.format(facts="\n".join(f"- {fact}" for fact in facts)),
        _summary(results),
        _exceptions(choices.values()),
        "## Test by test\n",
        _tests(results),
        _MORE.format(meanings="\n".join(f"- {CHOICES[name].meaning}" for name in more)),
        *(_tests(found) for found in more.values() if found),
        versions,
        _skips(results),
    ]
    return "\n".join(parts)


def _worlds(results: Results) -> list[int]:
    return sorted({world for _, world in results})


def _modes(results: Results) -> list[str]:
    return [name for name in MODES if any(mode == name for mode, _ in results)]


def counts(run: Run) -> str:
    found = Counter(outcome.kind for outcome in run.values())
    return ", ".join(f"{found[kind]} {kind}" for kind in KINDS if found[kind])


def skip_reasons(run: Run) -> Counter[str]:
    return Counter(outcome.reason for outcome in run.values() if outcome.kind == "skip")


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _grid(head: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [_row(head), "|" + "---|" * len(head), *(_row(row) for row in rows)]
    return "\n".join(lines) + "\n"


def _summary(results: Results) -> str:
    rows = []
    for mode in _modes(results):
        for world in _worlds(results):
            if (run := results.get((mode, world))) is None:
                continue
            counters: Counter[str] = Counter()
            for outcome in run.values():
                counters.update(outcome.counters)
            found = Counter(outcome.kind for outcome in run.values())
            engine = ("-",) * 3
            if MODES[mode].backend == "lossy":
                names = ("operations", "packets_injected", "packets_missing")
                engine = tuple(f"{counters[name]:,}" for name in names)
            seconds = sum(outcome.seconds for outcome in run.values())
            rows.append((mode, world, *(found[kind] for kind in KINDS), *engine, f"{seconds:.0f}"))
    head = [
        "mode", "ranks", *KINDS, "engine operations", "packets lost on purpose", "given up", "s",
    ]  # fmt: skip
    meanings = "\n".join(f"- *{mode}*: {MODES[mode].meaning}." for mode in _modes(results))
    return (
        f"## Counts\n\n{meanings}\n\n{_grid(head, rows)}\n"
        "Engine operations and packets are sums over all ranks, of the groups that were still "
        "there when a\ntest ended. The machine had other work as well, so the seconds say little.\n"
    )


def _exceptions(choices: Iterable[Results]) -> str:
    seen: dict[str, set[str]] = defaultdict(set)
    unknown = []
    for results in choices:
        for (mode, world), run in results.items():
            if mode == "gloo":
                continue
            unknown += contradictions(results["gloo", world], run, mode, world)
            for test in EXCEPTIONS.keys() & run.keys():
                seen[test].add(f"{mode}: {run[test].kind}")
    rows = [
        (f"`{test}`", ", ".join(sorted(seen[test])) or "not run", excuse.reason)
        for test, excuse in EXCEPTIONS.items()
    ]
    text = "## Exceptions\n\nTests that gloo passes and lossy doesn't.\n\n"
    text += _grid(["test", "outcomes", "reason"], rows)
    if unknown:
        listed = "\n".join(f"- {_cell(str(one))}" for one in unknown)
        text += f"\nNot explained yet:\n\n{listed}\n"
    return text


def _tests(results: Results) -> str:
    """One row per test that gloo doesn't skip; a cell has the outcomes at all world sizes."""
    modes, worlds = _modes(results), _worlds(results)
    names = sorted(
        {
            test
            for world in worlds
            for test, outcome in results["gloo", world].items()
            if outcome.kind != "skip"
        }
    )
    rows = []
    for test in names:
        cells = []
        for mode in modes:
            kinds = [
                results[mode, world][test].kind
                for world in worlds
                if test in results.get((mode, world), {})
            ]
            cells.append(kinds[0] if len(set(kinds)) == 1 else " / ".join(kinds))
        rows.append((f"`{test}`", *cells))
    sizes = " and ".join(str(world) for world in worlds)
    intro = f"At {sizes} ranks; where the outcomes differ, in this order.\n\n"
    return intro + _grid(["test", *modes], rows)


def _skips(results: Results) -> str:
    worlds = _worlds(results)
    tests: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    totals: Counter[tuple[str, int]] = Counter()
    for world in worlds:
        for test, outcome in results["gloo", world].items():
            if outcome.kind == "skip":
                tests[outcome.reason][test].add(world)
                totals[outcome.reason, world] += 1
    order = sorted(tests, key=lambda reason: (-len(tests[reason]), reason))
    rows = [
        (
            _cell(reason),
            *(totals[reason, world] for world in worlds),
            ", ".join(f"`{test.removeprefix('test_')}`" for test in sorted(tests[reason])),
        )
        for reason in order
    ]
    head = ["torch's reason", *(f"{world} ranks" for world in worlds), "tests (without `test_`)"]
    return "## Skipped, for gloo and so for lossy\n\n" + _grid(head, rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
