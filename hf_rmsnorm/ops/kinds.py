"""What a launch is, and what a kind of launches has to say of itself.

`norm_kinds` and `qk_kinds` have the kinds that there are. `launches` makes a launch by its
kind and keeps it; `first_use` compares it with what the kind computes in plain torch.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ..operands import Operands

FLOOR = 16 * 2.0**-24  # roundings of float32 in a row, of its largest term


class Launch(Protocol):
    """Starts kernels on operands of one layout, and allocates their results."""

    def on(self, operands: Operands) -> Operands:
        """The results for such operands."""


class Kind:
    """All that decides on a launch besides its operands.

    Each kind is a named tuple too: equal ones share launches. No two kinds have the same
    number of fields and of operands, so kinds of different classes share none.

    Attributes:
        name: what the launches compute, in words.
        weight_at: which of their operands is the first weight.
        is_back: they compute gradients.
    """

    __slots__ = ()
    name: str
    weight_at: int
    is_back = False

    def make(self, launches, operands: Operands, aligned: bool) -> Launch | None:
        """A launch for such operands; None if no kernel serves them."""
        raise NotImplementedError

    def results(self, launches, operands: Operands) -> Operands:
        """The results in plain torch."""
        raise NotImplementedError

    def floors(self, launches, operands: Operands, exact: Operands) -> tuple:
        """For each of the `exact` results of operands in float64 the error of each row,
        or of all, that roundings in float32 explain where terms cancel.
        """
        raise NotImplementedError

    def in_rows(self, launches, operands: Operands) -> Operands:
        """Operands that can be split by rows, for `results` and `floors`."""
        return operands

    def without_rows(self) -> tuple:
        """What of this kind does not follow from the number of rows."""
        return self


def largest(t: Tensor, dim: int | None = None) -> Tensor:
    """The largest magnitude in a tensor, or along a dimension of it."""
    return vector_norm(t, torch.inf, dim)
