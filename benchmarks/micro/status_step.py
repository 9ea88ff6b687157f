"""What being seen costs a step of the demo: the status page and metrics, and spans in the profiler.

``python -m benchmarks.micro.status_step`` trains the demo's model (plain DDP) over two groups in
the same processes, one with a status page and one without: a step of each kind in turn, in an order
drawn for each pair. It then does so under torch.profiler, with spans and without them. Since a
step's computation varies more than all of this costs, its calls are also made alone; their extra
time is told as a share of a whole step as well.

CPU seconds are of all threads of all ranks, the kernel's included. Time is that of the slowest
rank. A cost is the mean of the middle half of the pairs' differences, with a 95% interval by
bootstrap over jobs and their pairs. Metrics are asked for much more rarely than once a step, so an
answer is measured by itself.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import Any, Final

from benchmarks.common.tables import Table, add_report

FUNCTION: Final = "benchmarks.micro.status_step:rank_trains"
TABLE: Final = Table("measured-costs.md", "status-step", "CPU time of all ranks | added to a step")
GOAL: Final = 0.005
"""Of a step."""
WARM_UP: Final = 3
"""Pairs in which DDP builds its buckets, which don't count."""
CALLS: Final = 20
"""Pairs of calls for each pair of steps."""
SCRAPES: Final = 20
REST_SECONDS: Final = 3.0
SCRAPED_EVERY: Final = 15.0
"""Seconds, as in the examples of Prometheus' manual."""
CUT: Final = 0.25
DRAWS: Final = 1000
KINDS: Final = ("on", "off")

Pair = Mapping[str, tuple[float, float]]
"""Seconds and CPU seconds, with and without."""
Step = Callable[[], object]


def rank_trains(rank: int, world: int) -> dict[str, Any]:
    """One rank: pairs by what is measured, and what metrics cost where this rank serves them."""
    import torch
    import torch.distributed as dist

    from tests.support.harness import init

    torch.set_num_threads(1)
    init()
    settings = json.loads(os.environ["SETTINGS"])
    draw = random.Random(settings["job"])
    steps, calls = _made(rank, KINDS if settings["job"] % 2 else KINDS[::-1])

    def pairs(on: Step, off: Step, count: int) -> list[Pair]:
        kinds = {"on": on, "off": off}
        for _ in range(WARM_UP):
            on(), off()
        return [{kind: _timed(kinds[kind]) for kind in draw.sample(KINDS, 2)} for _ in range(count)]

    count = settings["pairs"]
    found = {
        "page, step": pairs(steps["on"], steps["off"], count),
        "page, calls": pairs(calls["on"], calls["off"], CALLS * count),
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        found["spans, step"] = pairs(steps["on"], _without_spans(steps["on"]), count)
        found["spans, calls"] = pairs(calls["on"], _without_spans(calls["on"]), CALLS * count)
    threads = {one.name: one for one in threading.enumerate()}
    serves = any("serve_forever" in name for name in threads)  # the rank that got the port
    answers = _metrics(threads["lossycoll-metrics"]) if serves else None
    dist.barrier()
    dist.destroy_process_group()
    return {"pairs": found, "metrics": answers}


def _made(rank: int, kinds: Sequence[str]) -> tuple[dict[str, Step], dict[str, Step]]:
    """The demo's step on a group of each kind, and the calls of a step alone."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from lossycoll.cli.demo.corpus import draw, load
    from lossycoll.cli.demo.model import ByteGPT, next_byte_loss
    from lossycoll.cli.demo.worker import ADAMW, LEARNING_RATE

    text = load(7).train
    torch.manual_seed(7)
    layers, width, context, batch = 2, 64, 64, 64  # as `lossycoll demo` has them
    model = ByteGPT(layers, width, context)
    size = sum(one.numel() for one in model.parameters())
    steps: dict[str, Step] = {}
    calls: dict[str, Step] = {}
    for kind in kinds:
        own = {"mtu": 1500, "status": kind}  # a host of its own, and so a page, or none
        group = dist.new_group(backend="lossy", pg_options=own)
        replica = DistributedDataParallel(copy.deepcopy(model), process_group=group)
        optimizer = torch.optim.AdamW(replica.parameters(), lr=LEARNING_RATE, **ADAMW)
        batches = torch.Generator().manual_seed(70_007 + rank)
        gradients = torch.zeros(size)

        def step(replica: Any = replica, optimizer: Any = optimizer, drawn: Any = batches) -> None:
            inputs, targets = draw(text, batch, context, drawn)
            loss = next_byte_loss(replica(inputs), targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        def call(group: Any = group, gradients: Any = gradients) -> None:
            dist.all_reduce(gradients, group=group)

        steps[kind], calls[kind] = step, call
    return steps, calls


def _without_spans(step: Step) -> Step:
    """The same step, as where no profiler runs."""
    from torch.autograd import profiler

    @contextmanager
    def switched() -> Iterator[None]:
        enabled = profiler._is_profiler_enabled
        profiler._is_profiler_enabled = False
        try:
            yield
        finally:
            profiler._is_profiler_enabled = enabled

    return switched()(step)


def _timed(step: Step) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process. All ranks begin together."""
    import torch.distributed as dist

    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - begin, time.process_time() - used


def _metrics(thread: threading.Thread) -> dict[str, float]:
    """CPU seconds of the thread that serves metrics, a second and an answer; the latter with those
    of the asker."""
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    begin, used = time.perf_counter(), time.clock_gettime(clock)
    time.sleep(REST_SECONDS)
    rest = (time.clock_gettime(clock) - used) / (time.perf_counter() - begin)
    used = time.process_time()
    for _ in range(SCRAPES):
        place = os.environ["LOSSYCOLL_METRICS"]
        with urllib.request.urlopen(f"http://{place}/metrics", timeout=30) as answer:
            assert b"lossycoll_operations_total" in answer.read()
    return {"rest": rest, "answer": (time.process_time() - used) / SCRAPES}


def of_job(ranks: Sequence[Sequence[Pair]]) -> list[Pair]:
    """Pairs of a job from those of its ranks: the slowest one's time, and the CPU of all."""
    return [
        {kind: (max(p[kind][0] for p in pair), sum(p[kind][1] for p in pair)) for kind in KINDS}
        for pair in zip(*ranks, strict=True)
    ]


def middle(values: Sequence[float]) -> float:
    """The mean without the least and the greatest quarter."""
    cut = int(len(values) * CUT)
    return fmean(sorted(values)[cut : len(values) - cut])


def cost(jobs: Sequence[Sequence[Pair]], which: int) -> tuple[float, float, float]:
    """Extra seconds, and their interval.

    Args:
        jobs: Pairs by job.
        which: 0: time; 1: CPU.
    """
    extra = [[pair["on"][which] - pair["off"][which] for pair in job] for job in jobs]
    draw = random.Random(7)

    def again() -> float:
        chosen = draw.choices(extra, k=len(extra))
        return middle([one for job in chosen for one in draw.choices(job, k=len(job))])

    found = sorted(again() for _ in range(DRAWS))
    whole = middle([one for job in extra for one in job])
    return whole, found[int(0.025 * DRAWS)], found[int(0.975 * DRAWS) - 1]


def share(extra: tuple[float, float, float], step: float) -> str:
    """A cost and its interval, of a step's."""
    value, low, high = (one / step for one in extra)
    return f"{value:.2%} ({low:.2%} to {high:.2%})"


def verdict(extra: tuple[float, float, float], step: float) -> str:
    """A cost in words.

    Args:
        extra: As :func:`cost` has it.
        step: Seconds of a step without.
    """
    value, low, high = (one / step for one in extra)
    text = f"{1e6 * extra[0]:+.0f} us, {value:+.3%} ({low:+.3%} to {high:+.3%})"
    if high <= GOAL:
        return f"{text} of a step: at most {GOAL:.1%}"
    return f"{text} of a step: " + (f"over {GOAL:.1%}" if low > GOAL else "too noisy to say")


def main() -> None:
    """Runs the jobs, and prints the costs."""
    from tests.support.harness import free_port, run_good

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=40, help="of steps, in each job")
    parser.add_argument("--ranks", type=int, default=2)
    add_report(parser, TABLE.page)
    options = parser.parse_args()
    parts: dict[str, list[list[Pair]]] = {}
    metrics = []
    for job in range(options.jobs):
        place = f"127.0.0.1:{free_port()}"
        settings = json.dumps({"job": job, "pairs": options.pairs})
        env = {"SETTINGS": settings, "LOSSYCOLL_METRICS": place}
        ranks = run_good(FUNCTION, options.ranks, env, timeout=1200)
        for name in ranks[0]["pairs"]:
            parts.setdefault(name, []).append(of_job([rank["pairs"][name] for rank in ranks]))
        metrics += [rank["metrics"] for rank in ranks if rank["metrics"]]
    whole = [pair["off"] for job in parts["page, step"] for pair in job]
    for which, what in enumerate(("time", "CPU")):
        step = median(one[which] for one in whole)
        print(f"{what}: {1000 * step:.1f} ms a step, of {len(whole)}")
        for name, jobs in parts.items():
            print(f"  {name}: {verdict(cost(jobs, which), step)}")
    rest, answer = (median(one[name] for one in metrics) for name in ("rest", "answer"))
    asked = rest + answer / SCRAPED_EVERY
    print(
        f"metrics, in one process of a machine: {1000 * answer:.1f} ms CPU an answer; asked every "
        f"{SCRAPED_EVERY:.0f} s {asked:.3%} of a core"
    )
    step = median(one[1] for one in whole)
    page, spans = (cost(parts[f"{name}, calls"], 1) for name in ("page", "spans"))
    rows = [
        ["status page", share(page, step)],
        [
            f"metrics, asked every {SCRAPED_EVERY:.0f} s: one process of a machine",
            f"{asked:.2%} of a core",
        ],
        ["spans, only while `torch.profiler` runs", share(spans, step)],
    ]
    TABLE.report(options.report, rows)


if __name__ == "__main__":
    main()
