"""Finds the LayerNorms of a float64 model by their arithmetic, as `patch_model` does:
first for `discover`, then of the converted proxy for `prove`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...formula import NormSpec
from ...fused.recipe import parameters_of
from ...patching.formula.recognise import recognise
from ...reference import reference_norm
from ...verification.context import is_float, leaves_of
from .run import run


@dataclass(frozen=True)
class ModelNorm:
    """A LayerNorm of a float64 model, over the last dimension, whose length is
    `hidden_size`.
    """

    spec: NormSpec
    hidden_size: int
    # float64, as it is stored; it broadcasts to the input from the right
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x."""
        # as torch returns it
        return reference_norm(x, self.weight, self.bias, self.spec).contiguous()

    @property
    def as_rms(self) -> ModelNorm:
        """The RMSNorm with the same eps and parameters."""
        return replace(self, spec=replace(self.spec, centered=False))


Norms = dict[str, ModelNorm]  # by path
NO_LAYER_NORM = "it has no LayerNorm: nothing to convert"
RMS_ALREADY = (
    "it uses RMSNorm already: nothing to convert; to fuse its norms, use patch_model"
)


def why_no_layer_norm(model: torch.nn.Module) -> str:
    """Why a model, with its weights or without, has nothing to convert; "" if one of its
    norms is a LayerNorm.
    """
    why = NO_LAYER_NORM
    for module in model.modules():
        recipe, refusal = recognise(module)
        if recipe is not None and recipe.spec.centered:
            return ""
        if recipe is not None:
            why = RMS_ALREADY
        elif refusal is not None:
            name = type(module).__name__
            why = f"patch_model would not run {name} as RMSNorm: {refusal.reason}"
    return why


@torch.no_grad()
def find_layer_norms(model: torch.nn.Module, inputs: dict) -> tuple[Norms, list[str]]:
    """(path -> norm, in the order they run; paths of norms that were not called)."""
    found = {path: recognise(leaf).recipe for path, leaf in leaves_of(model).items()}
    recipes = {
        path: recipe
        for path, recipe in found.items()
        if recipe is not None and recipe.spec.centered and recipe.is_of_rows
    }
    norms: Norms = {}

    def note(path, args, output):
        x = args[0]
        if is_float(x):
            module = model.get_submodule(path)
            recipe = recipes[path]
            weight, bias = parameters_of(module, recipe)
            norms[path] = ModelNorm(recipe.spec_of(module), x.shape[-1], weight, bias)

    run(model, inputs, recipes, note)
    silent = [path for path in recipes if path not in norms]
    return norms, silent
