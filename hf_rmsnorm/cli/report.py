"""What would be swapped in MODEL, with which formula, and what not and why.

Only the config is read: the modules are built without weights, so that a 70B model needs no memory.
"""

from __future__ import annotations

from . import models
from .common import Result, add_globs, add_model


def add_arguments(parser) -> None:
    add_model(parser)
    add_globs(parser)
    parser.add_argument("--strict", action="store_true", help="fail where a norm would be left unpatched")


def run(args) -> Result:
    source = models.find(args.model, args.trust_remote_code)
    models.quieten()
    from .. import patch_model

    model = models.empty_model(source)
    _materialise_vectors(model)
    report = patch_model(model, include=args.include, exclude=args.exclude, strict=args.strict)
    data = {"model": source.name, "class_name": type(model).__name__, **report.to_dict()}
    return Result(data, f"{source.name}: {type(model).__name__}\n{report}")


def _materialise_vectors(model) -> None:
    """Give real values to every leaf module that holds vectors only: recognising a norm means running it."""
    import torch

    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and all(p.is_meta and p.dim() < 2 for p in parameters) and not list(module.children()):
            module.to_empty(device="cpu")
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(1.0)
