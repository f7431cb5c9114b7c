"""Measures what this package promises: times, host costs, memory, machine code. Run it
from the root of a checkout.

    python -m benchmarks gpu           everything that only a GPU can tell, in one call of under ten minutes
    python -m benchmarks gpu-report    the tables of such a result, and a picture of its training losses
    python -m benchmarks host          time that a call keeps the host busy
    python -m benchmarks ratios        the same of one norm and layer, for the installed Triton alone
    python -m benchmarks cpu           time that a patch costs where no kernel runs
    python -m benchmarks layer         kernels and bytes of one decoder layer, and Liger's
    python -m benchmarks rows          what every kernel takes for a row, as it is compiled
    python -m benchmarks aot           registers, spills and access widths of the compiled kernels
    python -m benchmarks COMMAND --help

All but the first need no GPU. Nothing needs to be installed but the package's dependencies, and pytest for the tests
that `gpu` runs.
"""

import argparse
import sys

if not __package__:
    # started by its path, which puts this folder on the search path: kernels.py would
    # hide `kernels`
    sys.exit(
        "run this as a module, from the root of the checkout: python -m benchmarks"
    )

from benchmarks import aot_command, cpu, gpu_check, gpu_report, host_command, layer
from hf_rmsnorm.cli.main import Parser, add_command, execute

COMMANDS = {
    "gpu": gpu_check,
    "gpu-report": gpu_report,
    "host": host_command.Host(),
    "ratios": host_command.Ratios(),
    "cpu": cpu,
    "layer": layer,
    "rows": layer.Rows(),
    "aot": aot_command,
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns 0, 1 where `gpu` found a failure, 2 after an error,
    which is one line on stderr.
    """
    parser = Parser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        add_command(commands, name, module)
    return execute(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
