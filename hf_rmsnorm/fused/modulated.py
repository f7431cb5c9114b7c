"""What a patched module with an adaptive LayerNorm runs: the norm with the scale and shift behind it in one launch."""

import torch

from ..ops.modulated import modulated_norm
from .layer import observers, operands_ahead, tell


def modulated(module: torch.nn.Module, name: str, x, scale, *shift):
    """``norm(x) * (1 + scale) + shift`` of a child norm, in one launch where that gives the same bits.

    Args:
        module: whose forward this is.
        name: of the norm among its children.
        x, scale, shift: whatever the forward computes with; no shift where it adds nothing.
    """
    norm = module._modules.get(name)
    plain = torch.compiler.is_compiling() or not all(type(t) is torch.Tensor for t in (x, scale, *shift))
    found = None if norm is None or plain else operands_ahead(norm, restricted=True)
    if found is not None:
        weight, bias, spec = found
        if observers:
            tell(module, "modulation", (name, bool(shift)), (x, scale, *shift))
        recipe = type(norm)._hf_rmsnorm_recipe
        if recipe.fits(x, weight, bias) and recipe.rows_of(x) is x:
            y = modulated_norm(x, weight, bias, spec, scale, *shift)
            if y is not None:
                return y
    y = getattr(module, name)(x) * (1 + scale)
    return y + shift[0] if shift else y
