"""Try every type in Transformers with a tiny random model, from the root of a checkout.

    python -m scripts.coverage patch                                      every causal LM and base type, bit for bit
    python -m scripts.coverage patch --mapping causal --only llama,gpt2 --out two.json
    python -m scripts.coverage patch --mapping causal --interpreter fusion    also fused layers, interpreted
    python -m scripts.coverage convert --out scripts/results/convert-5.23.0.json
    python -m scripts.coverage diffusers --jobs 1 --out scripts/results/diffusers-0.42.1.json
    python -m scripts.coverage regimes --out scripts/results/regimes.json      trained, offloaded, sharded, ...
    python -m scripts.coverage regimes --check scripts/results/regimes.json    where that is no longer so

Each type runs in a process of its own, with a limit of time and of memory. What came of
it goes to the terminal, and with --out to a JSON with a line for each type.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

if not __package__:
    sys.exit(
        "run this as a module, from the root of the checkout: python -m scripts.coverage"
    )

from scripts.coverage import BadOptions

COMMANDS = {
    "patch": "patch each and compare it, bit for bit, with the model before",
    "convert": "convert each and prove it, as LayerNorm and as RMSNorm",
    "diffusers": "patch each transformer of diffusers, in the interpreter",
    "regimes": "count the fused pieces that run as kernels in each regime",
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m scripts.coverage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, words in COMMANDS.items():
        command = commands.add_parser(name, help=words)
        command.add_argument("--only", metavar="NAMES", help="separated by commas")
        command.add_argument("--out", type=Path, metavar="FILE", help="the JSON")
        if name == "regimes":
            help = "a JSON made earlier: another result is an error"
            command.add_argument("--check", type=Path, metavar="FILE", help=help)
            continue
        help = "how many at a time (default 2)"
        command.add_argument("--jobs", type=int, default=2, help=help)
        help = "a JSON made earlier: what is not redone stays"
        command.add_argument("--update", type=Path, metavar="FILE", help=help)
        if name != "diffusers":
            kinds = ("causal", "base", "all")
            command.add_argument("--mapping", choices=kinds, default="all")
        if name == "patch":
            help = "also run fused layers in Triton's interpreter"
            kinds = ("fusion",)
            command.add_argument("--interpreter", choices=kinds, default="", help=help)
    return made


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns 1 where a type gave a wrong result."""
    options = parser().parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    interpreted = options.command in ("diffusers", "regimes")
    if getattr(options, "interpreter", "") or interpreted:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    try:
        for name in ("update", "check"):
            file = getattr(options, name, None)
            if file and not file.is_file():
                raise BadOptions(f"there is no file {file}")
        return import_module(f"scripts.coverage.{options.command}").run(options)
    except BadOptions as error:
        parser().error(str(error))


if __name__ == "__main__":
    sys.exit(main())
