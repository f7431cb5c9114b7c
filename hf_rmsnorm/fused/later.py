"""A norm that is put off: until its result is rotated, or scaled and shifted by a helper.

A forward calls these functions once it was compiled again from its own source, by
`patching.layers.qk` and `patching.layers.modulation`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType

from torch import Tensor
from torch.nn import Module

from .layer import operands_ahead
from .modulated import OnePlusScale, modulated
from .watch import MODULATION, QK, note, watchers

# The functions that only scale and shift a norm's result, as
# `patching.layers.modulation` has read.
HELPERS: set[CodeType] = set()


@dataclass(slots=True, eq=False)
class Later:
    """``norm(x)`` that is not computed yet. The forward that made it reads it once.

    Attributes:
        ahead: what `operands_ahead` says of the norm.
        scale: what a helper has multiplied it by.
    """

    norm: Module
    x: Tensor
    ahead: tuple
    scale: OnePlusScale | None = None

    def transpose(self, first: int, second: int) -> Later:
        """It itself, of x transposed: not along the last dimension, which norms reduce."""
        self.x = self.x.transpose(first, second)
        return self

    def __mul__(self, one_plus_scale) -> Later:
        self.scale = OnePlusScale(one_plus_scale)
        return self

    def __add__(self, shift) -> Tensor:
        return modulated(self.x, self.norm, self.scale, shift)

    def unfused(self, x: Tensor) -> Tensor:
        """x through the norm's own forward."""
        patch, *_ = self.ahead
        return patch.unfused(self.norm, x)


def later(norm: Module, x, piece: str = QK) -> Later | Tensor:
    """``norm(x)``, put off until it is rotated. A norm that has to be called, as
    `operands_ahead` says, is called here, once.

    Args:
        piece: what it is put off for.
    """
    ahead = operands_ahead(norm)
    if ahead is not None:
        return Later(norm, x, ahead)
    if watchers:
        note(piece, (norm,), x, False)
    return norm(x)


def later_in(helper: Callable, norm: Module, x) -> Later | Tensor:
    """``norm(x)`` for a helper, put off until that scales and shifts it; called here if
    the helper is another than was read.
    """
    if getattr(helper, "__code__", None) in HELPERS:
        return later(norm, x, MODULATION)
    return norm(x)


def computed(*heads: Later | Tensor) -> list[Tensor]:
    """Heads of q and k; what was put off is computed now, by a call of its norm."""
    return [each.norm(each.x) if type(each) is Later else each for each in heads]
