"""Parse, run one subcommand, print its result or its error."""
# PYTHON_ARGCOMPLETE_OK: shells that complete for any program look for this word

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec

from .. import __version__
from . import bench, convert, env, report, run, verify
from .common import CliError, one_line, say

COMMANDS = (report, verify, convert, bench, env, run)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, and whose options may stand between
    positional arguments.
    """

    _mixed = False

    def parse_known_args(self, args=None, namespace=None):
        # the method below asks this one again
        if self._mixed or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._mixed = True
        try:
            parsed, unknown = self.parse_known_intermixed_args(args, namespace)
        finally:
            self._mixed = False
        if unknown:  # said here, where the help of the subcommand is named
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

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
    paragraph, _, _ = module.__doc__.partition("\n\n")
    summary, _, _ = " ".join(paragraph.split()).partition(". ")
    sub = commands.add_parser(
        name,
        help=summary.rstrip("."),
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(sub)
    sub.set_defaults(run=module.run, command=name)
    if module is run:  # its output is PROGRAM's
        return
    sub.add_argument(
        "--json", action="store_true", help="print one JSON object instead of text"
    )
    sub.add_argument(
        "--traceback", action="store_true", help="show where an error comes from"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: `argv`, or the process's own.

    Returns:
        0; 1 if `verify` does not print PASS; 2 after an error, which is one line on
        stderr; 3 if the result of `convert` fails its verification; 130 if the user
        interrupted it. `run` returns 0, or raises what its program raises.
    """
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ and find_spec("argcomplete"):
        import argcomplete

        argcomplete.autocomplete(parser)  # answers a shell, and exits
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"]:
        return _run_program(parser, words[1:])
    return execute(parser, words)


def _run_program(parser: Parser, words: list[str]) -> int:
    options, program = run.split(words)
    args = parser.parse_args(["run", *options])
    args.program = program
    try:
        args.found = run.find(program)
    except CliError as error:
        parser.error(str(error))
    return run.run(args)


def execute(parser: Parser, argv: Sequence[str] | None = None) -> int:
    """Parse, run the subcommand, print its result or its error in one line, and its
    warnings; returns the exit code.
    """
    args = parser.parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.stderr.isatty():  # on a terminal a download is seen
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("once", UserWarning)
        code = _run(parser.prog, args)
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            text = one_line(warning.message)
            print(f"{parser.prog}: warning: {text}", file=sys.stderr)
    return code


def _run(program: str, args) -> int:
    try:
        result = args.run(args)
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if args.traceback:
            raise
        # ours say what, where and the cure; of others the type says more
        ours = isinstance(error, ValueError) or "hf_rmsnorm" in type(error).__module__
        kind = "" if ours else f"{type(error).__name__}: "
        print(f"{program}: error: {kind}{one_line(error)}", file=sys.stderr)
        return 2
    text = result.text
    if args.json:
        from ..verification.report import plain

        text = json.dumps(plain(result.data), indent=2)
    say(text)
    return result.code
