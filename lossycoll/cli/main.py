"""The ``lossycoll`` command: finds the subcommand and calls it, nothing else."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from types import MappingProxyType
from typing import Any, Final, NoReturn

from lossycoll.errors import LabError, OptionError

from .answer import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, CommandError

COMMANDS: Final = {
    "demo": "demo.command",
    "bench": "bench.command",
    "doctor": "doctor.command",
    "lab": "lab",
    "try": "trial",
    "plan-threshold": "plan_threshold",
    "simulate": "simulate.command",
    "directory": "directory",
    "keygen": "keygen",
    "rekey": "rekey",
    "status": "status",
    "top": "top",
    "report": "report",
}
"""Names of the commands, and their modules. The one that is called is imported alone: where the
engine doesn't load, the doctor says so."""
TAKE_A_COMMAND = ("lab", "try")
EXIT_UNREAD = 141
"""Status that a shell reports for a program that SIGPIPE ended."""
FIRST_WORDS = f"""\
usage: lossycoll COMMAND [OPTIONS], where COMMAND is one of {", ".join(COMMANDS)}
try "lossycoll doctor" first, then "lossycoll demo"; "lossycoll --help" says what each does
"""
NEGATIVE: Final = re.compile(r"-(\.?\d|inf\b|nan\b)", re.IGNORECASE)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest name, and one that points to help."""

    commands: Mapping[str, Parser] = MappingProxyType({})
    """The parsers of the subcommands, by name."""

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        # argparse takes -1 for a value, and would take -1% for an option that it doesn't know.
        self._negative_number_matcher = NEGATIVE

    def error(self, message: str) -> NoReturn:
        found = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message)
        if found is not None:
            message += _did_you_mean(found[1], re.findall(r"[^', ]+", found[2]))
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n'{self.prog} --help' lists its options\n")

    def unrecognized(self, unknown: Sequence[str], remedy: str = "") -> NoReturn:
        options = _options_in(unknown)
        hint = remedy or (_did_you_mean(options[0], self._known()) if options else "")
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")

    def check_options(self, given: Sequence[str]) -> None:
        """Ends the program for options that it doesn't know.

        argparse would take the value of one for a word of its own and complain of that.
        """
        for option in _options_in(given):
            if not any(name.startswith(option) for name in self._known()):
                self.unrecognized([option])

    def _known(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]


def _options_in(words: Sequence[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def parser(command: str = "") -> Parser:
    """The parser of one command, or of all where it is none of them."""
    root = Parser(
        prog="lossycoll", description="Collectives for PyTorch that lose packets on purpose."
    )
    root.add_argument("--version", action="version", version=metadata.version("lossycoll"))
    commands = root.add_subparsers(dest="command", metavar="COMMAND")
    for name in [command] if command in COMMANDS else COMMANDS:
        module = import_module(f"{__package__}.{COMMANDS[name]}")
        summary = (module.__doc__ or "").splitlines()[0]
        own = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(own)
        own.set_defaults(run=module.run, parser=own)
    root.commands = commands.choices
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = None
    if given[:1] and given[0] in TAKE_A_COMMAND and "--" in given:
        # What follows is somebody else's command line.
        at = given.index("--")
        given, words = given[:at], given[at + 1 :]
    root = parser(given[0] if given else "")
    if words is not None:
        root.commands[given[0]].check_options(given)
    options, unknown = root.parse_known_args(given, argparse.Namespace(words=words, parser=root))
    chosen: Parser = options.parser
    del options.parser
    if unknown:
        takes = words is None and options.command in TAKE_A_COMMAND
        chosen.unrecognized(unknown, "; a command to run goes after --" if takes else "")
    if options.command is None:
        root.exit(EXIT_USAGE, FIRST_WORDS)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads has had enough, such as head. Python would flush once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_UNREAD
    except KeyboardInterrupt:
        reason, status = "stopped", EXIT_INTERRUPTED
    except CommandError as error:
        reason, status = str(error), error.status
    except LabError as error:
        reason, status = str(error), EXIT_FAILED
    except OptionError as error:
        reason, status = str(error), EXIT_USAGE
    else:
        return status
    print(f"lossycoll {options.command}: {reason}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
