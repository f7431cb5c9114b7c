"""A converted checkpoint in plain torch, with its LayerNorms as the RMSNorms that it
records.
"""

import copy

from torch import nn

from ..fused.norm import recipe_of
from ..fused.recipe import Recipe
from ..patching import patched
from ..reference import reference_norm


def as_recorded(model: nn.Module) -> nn.Module:
    """A copy of a converted model that shares its parameters and computes the recorded
    formulas in plain torch.
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    result = copy.deepcopy(model, shared)
    with patched(model, fuse_residual=False, numerics="model") as report:
        for record in report.swapped:
            if record.converted:
                recipe = recipe_of(model.get_submodule(record.path))
                norm = result.get_submodule(record.path)
                norm.__class__ = _plain(type(norm), recipe)
    return result


def _plain(base: type, recipe: Recipe) -> type:
    def forward(self, x):
        weight, bias = (
            name and getattr(self, name) for name in (recipe.weight, recipe.bias)
        )
        return reference_norm(x, weight, bias, recipe.spec)

    attributes = {"__module__": base.__module__, "forward": forward}
    return type(base)(base.__name__, (base,), attributes)
