"""Runs the examples under torchrun, with gloo and with lossy, and writes what became of them.

python examples/run.py                      # a table on standard output
python examples/run.py ddp_join fsdp        # only these
python examples/run.py --docs               # ... and into docs/examples.md and examples.json
python examples/run.py --docs fsdp          # ... the rows of these; others keep theirs
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lossycoll.cli.launcher import on_one_machine

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "examples.md"
INJECT = "loss=0.05,seed=7"
BEGIN, END = "<!-- examples: begin -->\n\n", "\n<!-- examples: end -->\n"

AGAIN = "torchrun starts all again; gloo fails in some runs"


@dataclass(frozen=True)
class Example:
    """``arguments`` are torchrun's. ``needs`` is a package that isn't in requirements-dev.txt."""

    name: str
    ranks: int
    shows: str
    note: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    needs: str = ""

    @property
    def lacks(self) -> str:
        """Why it can't be run here; empty if it can."""
        if not self.needs or importlib.util.find_spec(self.needs) is not None:
            return ""
        return f"{self.needs} isn't installed: pip install --requirement requirements-long.txt"


EXAMPLES = (
    Example("ddp", 2, "the smallest DDP job"),
    Example(
        "ddp_accumulation",
        2,
        "`no_sync`, gradient clipping",
        "run with `TORCH_DISTRIBUTED_DEBUG=DETAIL`, where DDP's constructor crashes with gloo",
        environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
    ),
    Example(
        "dropcompute",
        3,
        "`lossycoll.DropCompute`: a rank that is late drops micro-batches",
        "in each step another rank is slow, and nobody waits for it",
    ),
    Example("ddp_join", 3, "`join()` for uneven inputs", "replicas equal at the end"),
    Example(
        "ddp_buffers",
        2,
        "BatchNorm's buffers, static graph, activation checkpointing",
        "buffers equal after each forward",
    ),
    Example(
        "fsdp",
        4,
        "FSDP2, and HSDP on a 2 x 2 mesh: accumulation, evaluation, a distributed checkpoint, "
        "resume after a kill",
        "`DriftBound` across HSDP's rows; a step inside `reliable()` equals that of one process; "
        f"{AGAIN}",
        arguments=("--max-restarts", "1"),
    ),
    Example(
        "tensor_parallel",
        4,
        "DTensor's tensor parallel beside FSDP2 on a 2 x 2 mesh: accumulation, evaluation, a "
        "distributed checkpoint, resume after a kill",
        "`backend_override`: activations are reliable, equal to one process's, and gradients have "
        f"`max_missing`; {AGAIN}",
        arguments=("--max-restarts", "1"),
    ),
    Example(
        "flash_inference",
        2,
        "tensor parallel inference whose activations travel in 8 to 2 bits",
        "perplexity and time until the first token by encoding; what is lost is resent",
    ),
    Example("zero", 3, "ZeroRedundancyOptimizer", "replicas stay equal"),
    Example(
        "sharded",
        3,
        "`lossycoll.ShardedOptimizer`: lossy gradients and lossy weights",
        "no weight is ever more than `max_age` steps old; equal when they are consolidated",
    ),
    Example(
        "comm_hooks",
        2,
        "fp16, bf16 and PowerSGD with several buckets",
        "PowerSGD in a reliable group with `futures=in_order`; gloo has no such option, so its "
        "ranks issue collectives in different orders",
    ),
    Example(
        "post_local_sgd",
        4,
        "post-local SGD, model averaging",
        "subgroups made by hand: torch's default ones need CUDA, with any backend",
    ),
    Example(
        "checkpoint",
        2,
        "distributed checkpoints: `dcp.save`, `dcp.async_save` while training goes on, `dcp.load`",
        "both are loaded bit for bit into a new model",
    ),
    Example(
        "compiled_ddp",
        2,
        "torch.compile of a DDP model",
        "with `aot_eager`; `COMPILER=inductor` works as well, but compiles for a minute",
    ),
    Example("functional", 3, "functional collectives, also compiled"),
    Example(
        "restart",
        2,
        "a rank dies, `--max-restarts` starts all again from a checkpoint",
        "gloo meets the keys of the first attempt in torchrun's store",
        arguments=("--max-restarts", "1"),
    ),
    Example(
        "lightning_fit",
        2,
        "Lightning's `Trainer.fit` with accumulation, validation, epoch metrics, resume after a "
        "kill",
        f'`DDPStrategy(process_group_backend="lossy")`, {AGAIN}; needs requirements-long.txt',
        arguments=("--max-restarts", "1"),
        needs="lightning",
    ),
    Example(
        "fabric_fit",
        2,
        "Lightning Fabric: a loop of one's own, accumulation, a checkpoint, resume after a kill",
        f'`DDPStrategy(process_group_backend="lossy")`, {AGAIN}; needs requirements-long.txt',
        arguments=("--max-restarts", "1"),
        needs="lightning",
    ),
    Example(
        "transformers_fit",
        2,
        "Transformers' `Trainer` on accelerate: accumulation, evaluation, a checkpoint, resume "
        "after a kill",
        "`LOSSYCOLL_REPLACE=gloo`, since accelerate asks for gloo on CPUs; "
        f"{AGAIN}; needs requirements-long.txt",
        environment={"LOSSYCOLL_REPLACE": "gloo"},
        arguments=("--max-restarts", "1"),
        needs="transformers",
    ),
    Example(
        "accelerate_fit",
        2,
        "accelerate's own loop: accumulation, evaluation, a checkpoint, resume after a kill",
        f"`LOSSYCOLL_REPLACE=gloo`, {AGAIN}",
        environment={"LOSSYCOLL_REPLACE": "gloo"},
        arguments=("--max-restarts", "1"),
        needs="accelerate",
    ),
    Example(
        "trl_sft",
        2,
        "TRL's `SFTTrainer` with PEFT's LoRA: the same, and checkpoints of adapters",
        f"`LOSSYCOLL_REPLACE=gloo`, {AGAIN}",
        environment={"LOSSYCOLL_REPLACE": "gloo"},
        arguments=("--max-restarts", "1"),
        needs="trl",
    ),
    Example(
        "deepspeed_zero",
        2,
        "DeepSpeed's engine with ZeRO stage 2: the same",
        f"`LOSSYCOLL_MAX_MISSING=0.01`, {AGAIN}",
        environment={"LOSSYCOLL_MAX_MISSING": "0.01"},
        arguments=("--max-restarts", "1"),
        needs="deepspeed",
    ),
    Example(
        "pipeline",
        4,
        "torch's pipeline parallelism on a mesh of two pipelines: micro-batches, a distributed "
        "checkpoint, resume after a kill",
        f"activations are reliable, gradients of the replicas lossy; {AGAIN}",
        arguments=("--max-restarts", "1"),
    ),
)


@dataclass
class Outcome:
    """What one run did. ``status`` is torchrun's, None if it had to be ended. ``measured`` says
    when, and by which commit."""

    name: str
    backend: str
    status: int | None
    seconds: float
    summary: str
    measured: str = ""
    output: str = ""

    @property
    def verdict(self) -> str:
        if self.status is None:
            return f"no end within {self.seconds:.0f} s"
        return "passes" if self.status == 0 else "fails"


def run(example: Example, backend: str, timeout: float, python: str = sys.executable) -> Outcome:
    """One run of one example, with 5% of packets dropped if ``backend`` can do so.

    ``python``: the interpreter of torchrun, and so of the ranks.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOSSYCOLL_")}
    environment |= {k: v for k, v in on_one_machine().items() if v is not None}
    environment |= {"LOSSYCOLL_LOG": "warning", "LOSSYCOLL_INJECT": INJECT, **example.environment}
    torchrun = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    process = subprocess.Popen(
        [
            *(python, "-m", *torchrun, "--nproc-per-node", str(example.ranks)),
            *(*example.arguments, str(HERE / f"{example.name}.py"), "--backend", backend),
        ],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    begin = time.monotonic()
    status: int | None = None
    try:
        output = process.communicate(timeout=timeout)[0]
        status = process.returncode
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)  # torchrun passes it on to the ranks
        output = process.communicate()[0]
    seconds = time.monotonic() - begin
    found = re.search(rf"^{example.name}: (.+)$", output, re.MULTILINE)
    summary = found[1] if found else ""
    return Outcome(example.name, backend, status, round(seconds, 1), summary, now(), output)


def now() -> str:
    """Today, and the commit."""
    command = ["git", "rev-parse", "--short=10", "HEAD"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    return f"{time.strftime('%Y-%m-%d', time.gmtime())}, {done.stdout.strip() or 'no commit'}"


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each example; each needs an outcome for both backends."""
    by_name = {(outcome.name, outcome.backend): outcome for outcome in outcomes}
    rows = [
        "| Example | Shows | Ranks | gloo | lossy, 5% lost | Notes | measured |",
        "|---|---|---|---|---|---|---|",
    ]
    for example in EXAMPLES:
        if (example.name, "lossy") in by_name:
            gloo, lossy = (by_name[example.name, backend] for backend in ("gloo", "lossy"))
            link = f"[{example.name}](../examples/{example.name}.py)"
            seen = f"{lossy.verdict}: {lossy.summary}" if lossy.summary else lossy.verdict
            cells = (
                link,
                example.shows,
                example.ranks,
                gloo.verdict,
                seen,
                example.note,
                lossy.measured,
            )
            rows.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def write(outcomes: Sequence[Outcome]) -> None:
    """The figures as JSON beside docs/examples.md, and its table. Examples that didn't run keep
    their figures."""
    kept = json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8"))
    found = {(one["name"], one["backend"]): one for one in kept}
    for outcome in outcomes:
        fields = asdict(outcome)
        del fields["output"]
        found[outcome.name, outcome.backend] = fields
    keys = [(example.name, backend) for example in EXAMPLES for backend in ("gloo", "lossy")]
    figures = [found[key] for key in keys if key in found]
    PAGE.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    report(figures, PAGE.parent)


def report(figures: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Puts the table into its place in examples.md of a folder."""
    page = folder / PAGE.name
    before, rest = page.read_text(encoding="utf-8").split(BEGIN.rstrip())
    after = rest.split(END.lstrip())[1]
    text = table([Outcome(**one) for one in figures])
    page.write_text(before + BEGIN + text + END + after, encoding="utf-8")


def main() -> int:
    names = [example.name for example in EXAMPLES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="EXAMPLE", help="which to run (default: all)")
    parser.add_argument("--docs", action="store_true", help=f"write the table into {PAGE.name}")
    parser.add_argument("--timeout", type=float, default=90, help="seconds per run (default 90)")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no example {sorted(unknown)}; there are {', '.join(names)}")
    wanted = [one for one in EXAMPLES if not options.names or one.name in options.names]
    lacks = "; ".join(example.lacks for example in wanted if example.lacks)
    if options.docs and lacks:
        parser.error(f"--docs runs all of them, but {lacks}")
    outcomes = []
    for example in wanted:
        if example.lacks:
            print(f"{example.name}: skipped, {example.lacks}")
            continue
        for backend in ("gloo", "lossy"):
            outcome = run(example, backend, options.timeout)
            outcomes.append(outcome)
            print(f"{example.name}, {backend}: {outcome.verdict}, {outcome.seconds} s")
            if backend == "lossy" and outcome.status != 0:
                print(outcome.output)
    print(table(outcomes))
    if options.docs:
        write(outcomes)
    return 0 if all(o.status == 0 for o in outcomes if o.backend == "lossy") else 1


if __name__ == "__main__":
    sys.exit(main())
