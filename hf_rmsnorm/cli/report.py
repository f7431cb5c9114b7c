"""List the norms of MODEL that patch_model would swap, and those that it would skip
with the reason.

Only the config is read: the modules are built without weights, so that a model of any
size takes seconds and less than 1 GB of memory.
"""

from dataclasses import replace

from ..sources import find
from . import models
from .common import Result, add_choice_of_norms, add_model, pick_device, progress_bar


def add_arguments(parser) -> None:
    add_model(parser)
    add_choice_of_norms(parser)


def run(args) -> Result:
    source = find(args.model, args.trust_remote_code)
    models.quieten()
    from .. import patch_model
    from ..ops.backend import runs_on

    with progress_bar(1, f"building the modules of {source.name}, without weights"):
        model = models.empty_model(source)
        report = patch_model(model, args.include, args.exclude, args.strict)
    if report.swapped:  # the modules have no data, and would run here
        report = replace(report, devices=(runs_on(pick_device(None)),))
    name = type(model).__name__
    data = {"model": source.name, "class_name": name, **report.to_dict()}
    return Result(data, f"{source.name}: {name}\n{report}")
