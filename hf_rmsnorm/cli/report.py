"""List the norms of MODEL that patch_model would swap, and those that it would skip
with the reason.

Only the config is read: the modules are built without weights, so that a 70B model
needs no memory.
"""

from dataclasses import replace

from ..sources import find
from . import models
from .common import Result, add_model, add_verbose, pick_device


def add_arguments(parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--include",
        metavar="GLOB",
        action="append",
        help="patch only module paths that match",
    )
    parser.add_argument(
        "--exclude",
        metavar="GLOB",
        action="append",
        help="skip module paths that match",
    )
    parser.add_argument(
        "--strict", action="store_true", help="fail if a norm would be skipped"
    )
    add_verbose(parser, "every path, where a long list is cut else")


def run(args) -> Result:
    source = find(args.model, args.trust_remote_code)
    models.quieten()
    from .. import patch_model
    from ..ops.backend import runs_on

    model = models.empty_model(source)
    report = patch_model(
        model, include=args.include, exclude=args.exclude, strict=args.strict
    )
    if report.swapped:  # the modules have no data, and would run here
        report = replace(report, devices=(runs_on(pick_device(None)),))
    data = {
        "model": source.name,
        "class_name": type(model).__name__,
        **report.to_dict(),
    }
    return Result(
        data, f"{source.name}: {type(model).__name__}\n{report.to_text(args.verbose)}"
    )
