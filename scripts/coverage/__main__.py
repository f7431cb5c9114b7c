"""Try every type in Transformers with a tiny random model, from the root of a checkout.

    python -m scripts.coverage patch                                      every causal LM and base type, bit for bit
    python -m scripts.coverage patch --mapping causal --only llama,gpt2 --out two.json
    python -m scripts.coverage convert --out scripts/results/convert-5.23.0.json
    python -m scripts.coverage diffusers --jobs 1 --out scripts/results/diffusers-0.42.1.json
    python -m scripts.coverage regimes --out scripts/results/regimes.json      trained, offloaded, sharded, ...
    python -m scripts.coverage patch --check scripts/results/coverage-5.23.0.json    what runs as a kernel no longer

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

COMMANDS = {
    "patch": "patch each and compare it, bit for bit, with the model before",
    "convert": "convert each and prove it, as LayerNorm and as RMSNorm",
    "diffusers": "patch each transformer of diffusers, in the interpreter",
    "regimes": "count the fused pieces that run as kernels in each regime",
}

FEWER = "a JSON made earlier: fewer launches of a type are an error"
CHECK = {
    "patch": FEWER,
    "diffusers": FEWER,
    "regimes": "a JSON made earlier: another result is an error",
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m scripts.coverage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, words in COMMANDS.items():
        add = commands.add_parser(name, help=words).add_argument
        add("--only", metavar="NAMES", help="separated by commas")
        add("--out", type=Path, metavar="FILE", help="the JSON")
        if name != "convert":
            add("--check", type=Path, metavar="FILE", help=CHECK[name])
        if name != "regimes":
            add("--jobs", type=int, default=2, help="at a time (default 2)")
        if name in ("patch", "convert"):
            add("--mapping", choices=("causal", "base", "all"), default="all")
    return made


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns 1 where a type gave a wrong result, or with ``--check``
    launches fewer kernels.
    """
    options = parser().parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.command != "convert":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    return import_module(f"scripts.coverage.{options.command}").run(options)


if __name__ == "__main__":
    sys.exit(main())
