"""A converted checkpoint in plain torch, with its LayerNorms as the RMSNorms that it
records.
"""

import copy

import torch

from ..formula import NormSpec
from ..fused.norm import recipe_of
from ..patching import patched
from ..reference import reference_norm


def as_recorded(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a converted model that shares its parameters and computes the recorded
    formulas in plain torch.
    """
    result = copy.deepcopy(
        model, {id(t): t for t in (*model.parameters(), *model.buffers())}
    )
    with patched(model, fuse_residual=False, numerics="model") as report:
        recipes = {
            r.path: recipe_of(model.get_submodule(r.path))
            for r in report.swapped
            if r.converted
        }
    for path, recipe in recipes.items():
        norm = result.get_submodule(path)
        norm.__class__ = _plain(type(norm), recipe.spec, recipe.weight, recipe.bias)
    return result


def _plain(base: type, spec: NormSpec, weight: str | None, bias: str | None) -> type:
    def forward(self, x):
        parameters = (
            None if name is None else getattr(self, name) for name in (weight, bias)
        )
        return reference_norm(x, *parameters, spec)

    return type(base)(
        base.__name__, (base,), {"__module__": base.__module__, "forward": forward}
    )
