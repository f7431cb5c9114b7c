"""What a patched module with an adaptive LayerNorm runs: its norm, and what is around that, in one launch.

Around it are ``* (1 + scale) + shift`` behind, and ``residual + gate * x`` before. The sum is computed with all that is
behind it, which a local variable of the forward, `ahead`, holds until the forward gets there.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..ops.direct import capturing, state, under_transform, version
from ..ops.modulated import modulated_norm
from .layer import observers, operands_ahead, tell

# module -> {a norm's name: (the sum behind which it was computed last and not asked for yet, the modulation's memory)}
_untaken: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_in_vain: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # module -> sites behind which nobody asks for it


class Product(NamedTuple):
    """A product that only the sum behind it reads, which computes it."""

    left: torch.Tensor
    right: torch.Tensor


def put_off(left, right):
    """``left * right``, left to `modulated_sum`."""
    plain = torch.compiler.is_compiling() or not type(left) is type(right) is torch.Tensor
    return left * right if plain else Product(left, right)


def modulated_sum(module: torch.nn.Module, ahead: dict, left, right, site: tuple[str, bool, int], modulation: Callable):
    """``left + right``, with the norm that reads the sum, and its modulation, where that gives the same bits.

    Args:
        ahead: what `modulated` looks up: by the norm's name what was computed of which operands.
        left, right: tensors, or a `Product`.
        site: (the norm's name among the children, whether others may get hold of the sum or the norm may read another,
            which of the forward's sums this is).
        modulation: gives the scale and shift; it may raise, as what they are of may come later.
    """
    plain = torch.compiler.is_compiling() or under_transform() or torch.is_inference_mode_enabled()  # without versions
    if not (plain or site in _in_vain.get(module, ()) or (site[1] and torch.is_grad_enabled())):
        total = _sum_in_one_launch(module, ahead, site, _parts(left, right), modulation)
        if total is not None:
            return total
    left, right = (t.left * t.right if type(t) is Product else t for t in (left, right))
    return left + right


def _parts(left, right) -> tuple | None:
    """(x, residual, the gate of x or None) of a sum; None where these are no plain tensors."""
    if type(left) is Product:
        left, right = right, left
    x, factor = right, None
    if type(x) is Product:
        # A gate is smaller, or a part of a larger tensor.
        x, factor = sorted(x, key=lambda t: (t.numel(), t.is_contiguous()), reverse=True)
    return (x, left, factor) if type(x) is type(left) is torch.Tensor else None


def _sum_in_one_launch(module, ahead, site, parts, modulation) -> torch.Tensor | None:
    name, seen, _ = site
    norm = module._modules.get(name)
    operands = None if norm is None or parts is None else operands_ahead(norm, restricted=True)
    if operands is None or not (recipe := type(norm)._hf_rmsnorm_recipe).rounds_sum:
        return None
    (x, residual, factor), (weight, bias, spec) = parts, operands
    try:
        scale, *shift = modulation()
    except Exception:  # the forward says what is wrong, when it comes to that
        return None
    if not all(type(t) is torch.Tensor for t in (scale, *shift)):
        return None
    summands = x, residual, *([] if factor is None else [factor])
    if observers:
        tell(module, "modulation", (name, bool(shift), seen), (x, scale, *shift, *summands[1:]))
    if not recipe.fits(x, weight, bias) or recipe.rows_of(x) is not x:
        return None
    if torch.is_grad_enabled() and not any(t.requires_grad for t in summands):
        return None  # the sum would ask for gradients where the scale does
    made = modulated_norm(x, weight, bias, spec, scale, *(shift or [None]), residual, factor)
    if made is None:
        return None
    total, y = made
    before, _ = _untaken.setdefault(module, {}).get(name, (site, ()))
    if before != site:  # of two sums the norm reads the later, where a branch makes that
        _in_vain.setdefault(module, set()).add(before)
    _untaken[module][name] = site, [t.detach() for t in (scale, *shift)]  # or others could get their addresses
    ahead[name] = total, _state_of(total, weight, bias, spec, scale, *shift), y
    return total


def _state_of(x: torch.Tensor, weight, bias, spec, *modulation: torch.Tensor) -> tuple:
    """What has to be the same for the result to be the same, the sum itself aside."""
    modes = torch.is_grad_enabled(), capturing(x)
    shapes = ((*state(t), t.shape, t.stride(), t.dtype, t.requires_grad) for t in modulation)
    return version(x), state(weight), state(bias), spec, modes, *shapes


def _looked_at(x: torch.Tensor) -> bool:
    """Whether a gradient that goes by what was computed with the sum would be missed at the sum."""
    return x.requires_grad and bool(x._backward_hooks or x.retains_grad)


def modulated(module: torch.nn.Module, ahead: dict, name: str, x, scale, *shift):
    """``norm(x) * (1 + scale) + shift`` of a child norm, in one launch where that gives the same bits.

    Args:
        module: whose forward this is.
        ahead: what `modulated_sum` has computed.
        name: of the norm among its children.
        x, scale, shift: whatever the forward computes with; no shift where it adds nothing.
    """
    norm = module._modules.get(name)
    plain = torch.compiler.is_compiling() or under_transform()
    plain = plain or not all(type(t) is torch.Tensor for t in (x, scale, *shift))
    found = None if norm is None or plain else operands_ahead(norm, restricted=True)
    if found is not None:
        weight, bias, spec = found
        if observers:
            tell(module, "modulation", (name, bool(shift)), (x, scale, *shift))
        recipe = type(norm)._hf_rmsnorm_recipe
        if recipe.fits(x, weight, bias) and recipe.rows_of(x) is x:
            total, known, y = ahead.pop(name, (None, None, None))
            if total is x and known == _state_of(x, weight, bias, spec, scale, *shift) and not _looked_at(x):
                _untaken.get(module, {}).pop(name, None)
                return y
            made = modulated_norm(x, weight, bias, spec, scale, *shift)
            if made is not None:
                return made[1]
    y = getattr(module, name)(x) * (1 + scale)
    return y + shift[0] if shift else y
