"""A converted checkpoint in plain torch, with its LayerNorms as the RMSNorms that it
records.
"""

import copy
from functools import partial

import torch
from torch import nn

from ..fused.norm import recipe_of
from ..fused.recipe import Recipe, parameters_of
from ..patching import patched
from ..reference import reference_norm


def as_recorded(model: nn.Module) -> nn.Module:
    """A copy of a converted model that shares its parameters and computes the recorded
    formulas in plain torch.
    """
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    result = copy.deepcopy(model, shared)
    with patched(model) as report:
        for record in report.swapped:
            if record.converted:
                recipe = recipe_of(model.get_submodule(record.path))
                norm = result.get_submodule(record.path)
                norm.forward = partial(_forward, norm, recipe)
    return result


def _forward(norm: nn.Module, recipe: Recipe, x: torch.Tensor) -> torch.Tensor:
    return reference_norm(x, *parameters_of(norm, recipe), recipe.spec)
