"""Parse, run one subcommand, print its result or its error."""
# PYTHON_ARGCOMPLETE_OK: shells that complete for any program look for this word

import argparse
import json
import os
import sys
import textwrap
import warnings
from collections.abc import Sequence
from importlib.util import find_spec

from .. import __version__
from ..paths import did_you_mean
from . import bench, convert, env, inspect, report, verify
from .common import CliError, one_line, say

COMMANDS = (report, verify, inspect, convert, bench, env)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose options may stand between positional arguments.

    Its errors are one line, which names the known word that is like a misspelt one.
    """

    _mixed = False

    def parse_known_args(self, args=None, namespace=None):
        if self._mixed:  # which the method below asks again
            return super().parse_known_args(args, namespace)
        if self._subparsers is not None:
            # before it asks for a COMMAND
            self._refuse_unknown((sys.argv[1:] if args is None else args)[:1])
            return super().parse_known_args(args, namespace)
        self._mixed = True
        try:
            parsed, unknown = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixed = False
        self._refuse_unknown(unknown)
        return parsed, unknown

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Refuse a word with a dash that is no option, and no beginning of one."""
        for word in words:
            name = word.partition("=")[0]
            known = [*self._option_string_actions]
            if name.startswith("-") and not any(
                option.startswith(name) for option in known
            ):
                self.error(f"unrecognized arguments: {word}{did_you_mean(name, known)}")

    def _check_value(self, action, value) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), map(str, action.choices))
            raise

    def error(self, message: str):
        self.exit(
            2, f"{self.prog}: error: {one_line(message)} (see {self.prog} --help)\n"
        )


def build_parser() -> Parser:
    parser = Parser(
        prog="hf-rmsnorm",
        description="Fused RMSNorm and LayerNorm for Hugging Face models.",
    )
    parser.add_argument(
        "--version", action="version", version=f"hf-rmsnorm {__version__}"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        add_command(commands, module.__name__.rpartition(".")[2], module)
    return parser


def add_command(commands, name: str, module) -> None:
    """Add a subcommand whose help is the module's docstring; its `run` finds the name
    in ``args.command``.
    """
    summary = module.__doc__.splitlines()[0]
    texts = {
        "help": summary[0].lower() + summary[1:].rstrip("."),
        "description": _in_columns(module.__doc__),
    }
    sub = commands.add_parser(
        name, **texts, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(sub)
    sub.add_argument(
        "--json", action="store_true", help="print one JSON object instead of text"
    )
    sub.add_argument(
        "--traceback", action="store_true", help="show where an error comes from"
    )
    sub.set_defaults(run=module.run, command=name)


def _in_columns(text: str) -> str:
    """The paragraphs in 100 columns; those with indented lines, such as examples, as
    they are.
    """
    paragraphs = []
    for part in text.strip().split("\n\n"):
        indented = "\n " in f"\n{part}"
        paragraphs.append(
            part if indented else textwrap.fill(part, 100, break_on_hyphens=False)
        )
    return "\n\n".join(paragraphs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: `argv`, or the process's own.

    Returns:
        0; 1 if `verify` or `bench` prints FAIL; 2 after an error, which is one line on
        stderr; 3 if the result of
        `convert` fails its verification; 130 if the user interrupted it.
    """
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ and find_spec("argcomplete"):
        import argcomplete

        argcomplete.autocomplete(parser)  # answers a shell, and exits
    return execute(parser, argv)


def execute(parser: Parser, argv: Sequence[str] | None = None) -> int:
    """Parse, run the subcommand, print its result or its error in one line; returns the
    exit code.
    """
    args = parser.parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():  # on a terminal a download is seen
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("once", UserWarning)
        try:
            result = args.run(args)
        except Exception as error:
            if args.traceback:
                raise
            own = isinstance(error, (CliError, ValueError)) or type(
                error
            ).__module__.startswith("hf_rmsnorm")
            hint = "" if own else f"{type(error).__name__}: "
            print(f"{parser.prog}: error: {hint}{one_line(error)}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            resumed = (
                ": the same command goes on where it stopped"
                if args.run is convert.run
                else ""
            )
            print(f"{parser.prog}: interrupted{resumed}", file=sys.stderr)
            return 130
        finally:
            for line in dict.fromkeys(
                one_line(w.message)
                for w in caught
                if issubclass(w.category, UserWarning)
            ):
                print(f"{parser.prog}: warning: {line}", file=sys.stderr)
    say(_as_json(result.data) if args.json else result.text)
    return result.code


def _as_json(data: dict) -> str:
    from ..verification.report import plain

    return json.dumps(plain(data), indent=2, allow_nan=False)
