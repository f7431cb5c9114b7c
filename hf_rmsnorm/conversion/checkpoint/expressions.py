"""How a tensor of a native target is computed from tensors of the source: a few expressions, row by row in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch

PIECE = 1 << 17
"""Elements that an expression has in float64 at a time, where a row has fewer: 1 MiB, which allocators use again."""


class Values(Protocol):
    """A checkpoint whose tensors are read in ranges of rows: indices of their first axis."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of a tensor.

        Raises:
            ConversionError: there is none of this name.
        """

    def rows(self, key: str, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) in float64, in memory of their own."""


class Expression:
    """A tensor that is computed. Its dtype is that of the tensor `like` of the source."""

    like: str

    def keys(self) -> set[str]:
        """The tensors that it is computed from."""
        return self.of.keys()

    def shape(self, values: Values) -> tuple[int, ...]:
        return self.of.shape(values)

    def cost(self, values: Values) -> int:
        """Elements in memory for one row."""
        return self.of.cost(values)

    def rows(self, values: Values, first: int, last: int) -> torch.Tensor:
        """Rows [first, last) in float64; the caller may write into them."""
        raise NotImplementedError

    def pieces(self, values: Values) -> Iterator[torch.Tensor]:
        """All rows, in pieces of bounded size."""
        count = self.shape(values)[0]
        step = max(1, PIECE // max(1, self.cost(values)))
        for first in range(0, count, step):
            yield self.rows(values, first, min(count, first + step))


@dataclass(eq=False)
class Stored(Expression):
    """A tensor of the source as it is."""

    like: str

    def keys(self):
        return {self.like}

    def shape(self, values):
        return values.shape(self.like)

    def cost(self, values):
        return prod(values.shape(self.like)[1:])

    def rows(self, values, first, last):
        return values.rows(self.like, first, last)


@dataclass(eq=False)
class _Of(Expression):
    of: Expression

    @property
    def like(self):
        return self.of.like


@dataclass(eq=False)
class Centred(_Of):
    """Less the mean of each block along an axis: what writes to the stream, along the features.

    Args:
        block, blocks: as in `Centre`; a block of 0 is the whole axis.
    """

    axis: int
    block: int = 0
    blocks: tuple[int, ...] | None = None
    _means: torch.Tensor | None = field(default=None, repr=False)

    def rows(self, values, first, last):
        x = self.of.rows(values, first, last)
        length = self.of.shape(values)[self.axis]
        block = self.block or length
        chosen = list(range(length // block)) if self.blocks is None else list(self.blocks)
        if self.axis:
            split = x.unflatten(self.axis, (-1, block)).movedim(self.axis, 0)
            split[chosen] -= split[chosen].mean(self.axis + 1, keepdim=True)
            return x
        of_row = torch.arange(length) // block
        if self._means is None:
            at, sums = 0, torch.zeros(length // block, *x.shape[1:], dtype=torch.float64)
            for piece in self.of.pieces(values):
                sums.index_add_(0, of_row[at : at + len(piece)], piece)
                at += len(piece)
            self._means = torch.zeros_like(sums)
            self._means[chosen] = sums[chosen] / block
        return x.sub_(self._means[of_row[first:last]])


@dataclass(eq=False)
class Rows(_Of):
    """Chosen rows in a new order: a part of a fused tensor, or the channels of each head moved."""

    index: torch.Tensor = field(repr=False)

    def shape(self, values):
        return (len(self.index), *self.of.shape(values)[1:])

    def rows(self, values, first, last):
        index = self.index[first:last]
        low = int(index.min())
        return self.of.rows(values, low, int(index.max()) + 1)[index - low]


@dataclass(eq=False)
class Transposed(_Of):
    """A matrix transposed; it is in memory whole."""

    def shape(self, values):
        return self.of.shape(values)[::-1]

    def cost(self, values):
        return PIECE * prod(self.of.shape(values))  # one piece

    def pieces(self, values):
        yield self.rows(values, 0, self.shape(values)[0])

    def rows(self, values, first, last):
        whole = torch.cat(list(self.of.pieces(values)))
        return whole[:, first:last].T.contiguous()


@dataclass(eq=False)
class Plus(_Of):
    """A number added: a norm's weight that is stored less one."""

    number: float

    def rows(self, values, first, last):
        return self.of.rows(values, first, last) + self.number


@dataclass(eq=False)
class Scaled(_Of):
    """Times a vector along an axis."""

    by: Expression
    axis: int

    def keys(self):
        return self.of.keys() | self.by.keys()

    def rows(self, values, first, last):
        x = self.of.rows(values, first, last)
        by = torch.cat(list(self.by.pieces(values)))
        by = by if self.axis else by[first:last]
        return x * by.view([-1 if axis == self.axis else 1 for axis in range(x.ndim)])


@dataclass(eq=False)
class Filled(_Of):
    """A vector of one number, as long as `of` has rows or, with `axis` 1, columns."""

    number: float
    axis: int = 0

    def shape(self, values):
        return (self.of.shape(values)[self.axis],)

    def cost(self, values):
        return 1

    def rows(self, values, first, last):
        return torch.full((last - first,), self.number, dtype=torch.float64)


@dataclass(eq=False)
class FoldedBias(_Of):
    """The bias that a linear of weight `of` gets when a vector is added to its input: W shift + bias."""

    shift: Expression
    bias: Expression | None = None

    def keys(self):
        return self.of.keys() | self.shift.keys() | (self.bias.keys() if self.bias else set())

    def shape(self, values):
        return self.of.shape(values)[:1]

    def rows(self, values, first, last):
        y = self.of.rows(values, first, last) @ torch.cat(list(self.shift.pieces(values)))
        return y + self.bias.rows(values, first, last) if self.bias else y


def is_zero(expression: Expression, values: Values) -> bool:
    """Every element is 0."""
    return not any(bool(piece.any()) for piece in expression.pieces(values))


def largest_output(weight: Expression, gain: Expression | None, bias: Expression | None, values: Values) -> float:
    """A bound of |W (gain * x) + bias| over every normalised x: |x| is at most sqrt(n), so Cauchy-Schwarz gives it."""
    n = weight.shape(values)[1]
    gains = torch.cat(list(gain.pieces(values))) if gain else 1.0
    norms = torch.cat([(piece * gains).norm(dim=1) for piece in weight.pieces(values)]) * n**0.5
    return float((norms + (torch.cat(list(bias.pieces(values))).abs() if bias else 0.0)).max())
