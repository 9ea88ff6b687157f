"""Checks which Pythons and torch versions an installed lossycoll works with.

    python tools/check_versions.py python3.10:2.13.0 python3.13:2.14.1
    python tools/check_versions.py .venv/bin/python:installed --no-isolation
    python tools/check_versions.py --wheel dist/lossycoll-*x86_64.whl python3.13:none

Each argument is PYTHON:TORCH. PYTHON is an interpreter. TORCH is a version, which pip then installs
in full (a CUDA build takes gigabytes); "installed" for the torch that PYTHON already has, which is
borrowed and not touched; or "none", to check no more than the engine. For each pair:

1. build    the wheel, with that Python, by "python -m build" (sdist, then the wheel from it)
2. engine   the wheel in an empty environment, outside the source tree: tools/smoke_engine.py
3. torch    the wheel that the first pair built, with torch: tools/smoke_torch.py on 2 ranks under
            torchrun with 5% of packets dropped, and the command line
4. removal  after pip uninstall, torch still imports

With --wheel nothing is built: that wheel is installed, and no environment finds a compiler.

A pair counts as claimed when the package's own requirements admit it; what works without being
claimed is no failure. Exit code 1: something claimed doesn't work; 2: an argument makes no sense.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

TOOLS = Path(__file__).resolve().parent
SOURCE = TOOLS.parent
STEP_SECONDS = 300.0
INSTALL_SECONDS = 1800.0  # torch's CUDA build comes with gigabytes of libraries
TAIL_LINES = 80  # torchrun writes much after the cause
NOT_RUN = "-"
OK = "ok"
FAILED = "FAILED"
STEPS = ("build", "engine", "torch", "removal")


class StepFailed(Exception):
    """A command of a step ended badly; the text is what it was and the end of its output."""


@dataclass
class Result:
    """What became of one pair. ``torch`` is the full version, such as 2.13.0+cpu, once known."""

    python: str
    torch: str
    wheel: str = ""
    claimed: bool = True
    steps: dict[str, str] = field(default_factory=lambda: dict.fromkeys(STEPS, NOT_RUN))
    said: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return FAILED not in self.steps.values()


@dataclass(frozen=True)
class Pair:
    python: Path
    torch: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        name, _, torch = text.rpartition(":")
        found = shutil.which(name) if name else None
        if found is None or not torch:
            raise argparse.ArgumentTypeError(f"{text!r} is not PYTHON:TORCH with a Python found")
        # Not resolved: a virtual environment's python is a link, and means the environment.
        return cls(Path(found).absolute(), torch)


class Environment:
    """A virtual environment of its own, of the given Python."""

    def __init__(self, python: Path, folder: Path, *, borrow: bool) -> None:
        """``borrow``: what PYTHON has installed, except lossycoll, is there too."""
        self.folder = folder
        self.python = folder / "bin" / "python"
        # The borrowed packages include pip.
        pip = ["--without-pip"] if borrow else []
        call([python, "-m", "venv", *pip, folder], INSTALL_SECONDS)
        if borrow:
            self._borrow(python)

    def pip(self, *arguments: object) -> str:
        return call([self.python, "-m", "pip", *arguments], INSTALL_SECONDS)

    def ask(self, code: str) -> str:
        return call([self.python, "-c", code]).strip()

    def _borrow(self, python: Path) -> None:
        """By links rather than by naming the other's folder: what lossycoll left in there, an
        editable installation perhaps, would be found by torch."""
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        lent = self.folder / "lent"
        lent.mkdir()
        for entry in Path(call([python, "-c", where]).strip()).iterdir():
            if "lossycoll" not in entry.name and entry.suffix != ".pth":
                (lent / entry.name).symlink_to(entry)
        (Path(self.ask(where)) / "lent.pth").write_text(f"{lent}\n", encoding="utf-8")


class Checker:
    """Checks pairs in ``folder``; wheels are kept by Python version."""

    def __init__(self, folder: Path, *, isolation: bool, wheel: Path | None = None) -> None:
        self._folder = folder
        self._isolation = isolation
        self._given = wheel
        self._wheels: dict[str, Path] = {}

    def check(self, pair: Pair) -> Result:
        begin = time.monotonic()
        version = call([pair.python, "-c", "import platform; print(platform.python_version())"])
        result = Result(python=version.strip(), torch=pair.torch)
        folder = Path(tempfile.mkdtemp(prefix=f"{result.python}-{pair.torch}-", dir=self._folder))
        step = ""
        try:
            borrow = pair.torch == "installed"
            if self._given is None:
                step = progress(result, "build")
                wheel = self._build(pair.python, result.python, folder / "build", borrow=borrow)
                result.steps[step] = OK
            else:
                wheel = self._given

            step = progress(result, "engine")
            environment = Environment(pair.python, folder / "env", borrow=borrow)
            only_binary = ["--only-binary=:all:"] if self._given else []
            if not borrow:
                environment.pip("install", "--quiet", *only_binary, *requirements(wheel))
            environment.pip("install", "--quiet", "--no-deps", wheel)
            result.said.append(outside(environment, TOOLS / "smoke_engine.py"))
            result.steps[step] = OK
            result.wheel = wheel.name
            if pair.torch == "none":
                return result

            step = progress(result, "torch")
            if not borrow:
                environment.pip("install", "--quiet", f"torch=={pair.torch}")
            first = next(iter(self._wheels.values()), wheel)
            environment.pip("install", "--quiet", "--no-deps", "--force-reinstall", first)
            result.wheel = first.name
            result.torch = environment.ask("import torch; print(torch.__version__)")
            result.claimed = claimed(environment)
            result.said.append(distributed(environment))
            command_line(environment)
            result.steps[step] = OK

            step = progress(result, "removal")
            environment.pip("uninstall", "--quiet", "--yes", "lossycoll")
            environment.ask(
                "import torch; assert 'lossy' not in torch.distributed.Backend._plugins"
            )
            result.steps[step] = OK
        except StepFailed as error:
            result.steps[step] = FAILED
            result.said.append(str(error))
            print(error, file=sys.stderr, flush=True)
        finally:
            result.seconds = round(time.monotonic() - begin, 1)
            shutil.rmtree(folder, ignore_errors=True)
        return result

    def _build(self, python: Path, version: str, folder: Path, *, borrow: bool) -> Path:
        if version in self._wheels:
            return self._wheels[version]
        environment = Environment(python, folder, borrow=borrow)
        if not borrow:
            environment.pip("install", "--quiet", "build")
        out = self._folder / "dist" / version
        # A copy, for setuptools leaves its files beside the sources.
        source = folder / "source"
        shutil.copytree(SOURCE, source, ignore=left_behind)
        isolation = [] if self._isolation else ["--no-isolation"]
        call([environment.python, "-m", "build", *isolation, "--outdir", out, source])
        (self._wheels[version],) = out.glob("*.whl")
        return self._wheels[version]


def left_behind(folder: str, names: list[str]) -> set[str]:
    """For copytree: only what a build may need, so that nothing built earlier can be used."""
    if Path(folder) == SOURCE:
        wanted = {"lossycoll", "native", "pyproject.toml", "setup.py", "MANIFEST.in"}
        return set(names) - wanted - {"README.md", "LICENSE"}
    built = (".so", ".o")
    return {n for n in names if n == "__pycache__" or n.endswith(built) or n == "_native.c"}


def requirements(wheel: Path) -> list[str]:
    """What the wheel requires, apart from torch and extras."""
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        wanted = message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    return [w for w in wanted if not w.startswith("torch") and "extra ==" not in w]


def claimed(environment: Environment) -> bool:
    """Whether lossycoll's requirements admit the versions that are installed."""
    done = subprocess.run(
        [environment.python, "-m", "pip", "check"],
        capture_output=True,
        text=True,
        timeout=STEP_SECONDS,
        check=False,
    )
    return not any(line.startswith("lossycoll ") for line in done.stdout.splitlines())


def distributed(environment: Environment) -> str:
    return outside(
        environment,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        # A host whose own name does not resolve must still be able to talk to itself.
        "--local-addr=127.0.0.1",
        TOOLS / "smoke_torch.py",
        more={"LOSSYCOLL_INJECT": "loss=0.05,seed=7"},
    )


def command_line(environment: Environment) -> None:
    """Exit code 1 of the doctor means that he found something on this machine; he lives."""
    script = environment.folder / "bin" / "lossycoll"
    with tempfile.TemporaryDirectory() as empty:
        call([script, "--help"], cwd=empty)
        done = subprocess.run(
            [script, "doctor", "--json"],
            capture_output=True,
            text=True,
            timeout=STEP_SECONDS,
            cwd=empty,
            env=variables(),
            check=False,
        )
    try:
        json.loads(done.stdout)["checks"]
    except (ValueError, KeyError) as error:
        raise StepFailed(f"lossycoll doctor --json:\n{done.stdout}{done.stderr}") from error


def outside(
    environment: Environment, *command: object, more: Mapping[str, str] | None = None
) -> str:
    """The last line that a command of the environment's Python prints, run in an empty folder."""
    with tempfile.TemporaryDirectory() as empty:
        said = call([environment.python, *command], cwd=empty, more=more)
    return said.strip().splitlines()[-1]


def variables(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The caller's environment without what would lead back to the source tree or change a job."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LOSSYCOLL_", "PYTHON", "TORCH"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **(more or {})}


def call(
    command: list[object],
    seconds: float = STEP_SECONDS,
    *,
    cwd: str | None = None,
    more: Mapping[str, str] | None = None,
) -> str:
    """Standard output of a command that must end well. Raises StepFailed."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=cwd,
            env=variables(more),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StepFailed(f"{' '.join(words)}\nnot done after {seconds:g} s") from error
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-TAIL_LINES:])
        raise StepFailed(f"{' '.join(words)}\nexit code {done.returncode}\n{tail}")
    return done.stdout


def progress(result: Result, step: str) -> str:
    print(f"Python {result.python}, torch {result.torch}: {step} ...", file=sys.stderr, flush=True)
    return step


def show(results: list[Result]) -> None:
    """The table, in the form that docs/versions.md has it."""
    print("| Python | torch | claimed | " + " | ".join(STEPS) + " | seconds |")
    print("|---|---|---|" + "---|" * len(STEPS) + "---|")
    for result in results:
        steps = " | ".join(result.steps[step] for step in STEPS)
        yes = "yes" if result.claimed else "no"
        print(f"| {result.python} | {result.torch} | {yes} | {steps} | {result.seconds:.0f} |")
    print()
    for result in results:
        print(f"Python {result.python}, torch {result.torch} ({result.wheel or 'no wheel'}):")
        for text in result.said:
            print("  " + text.replace("\n", "\n  "))


def main() -> int:
    about, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="+", type=Pair.parse, metavar="PYTHON:TORCH")
    parser.add_argument(
        "--no-isolation",
        action="store_true",
        help='build with the packages of PYTHON (needs ":installed"), without an index',
    )
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="install this; build nothing")
    parser.add_argument("--out", type=Path, help="keep the wheels and sdists in this folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    options = parser.parse_args()
    if options.no_isolation and any(pair.torch != "installed" for pair in options.pairs):
        parser.error('--no-isolation needs pairs whose torch is "installed"')
    if options.wheel and options.out:
        parser.error("--out keeps what was built; with --wheel nothing is")
    if options.wheel:
        os.environ.update(dict.fromkeys(("CC", "CXX"), "/bin/false"))

    with tempfile.TemporaryDirectory(prefix="lossycoll-versions-") as folder:
        isolation, wheel = not options.no_isolation, options.wheel and options.wheel.absolute()
        checker = Checker(Path(folder), isolation=isolation, wheel=wheel)
        results = [checker.check(pair) for pair in options.pairs]
        if options.out:
            shutil.copytree(Path(folder) / "dist", options.out, dirs_exist_ok=True)
    show(results)
    if options.json:
        report = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "results": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all(result.good or not result.claimed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
