"""How each tensor of a result is made: read from the source, changed in float64, and
rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from ..record import RECORD_KEY, centre_, is_centred
from .checkpoint.source import FLOATS, Checkpoint
from .plan import BadTensor, ConversionError

ROWS = 1 << 10  # of a matrix that are in float64 at a time


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch: slices are too small for more, and sums are in the same
    order on every machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class InMemory:
    """The tensors of a model as a source."""

    tensors: Mapping[str, torch.Tensor]
    config: dict = field(default_factory=dict)
    dtype: torch.dtype | None = None

    def read(self, name: str, rows: torch.Tensor | None = None) -> torch.Tensor:
        """A copy of a tensor, or of these rows of it."""
        tensor = self.tensors[name].detach()
        return tensor.clone() if rows is None else tensor[rows]


Source = Checkpoint | InMemory


@dataclass(frozen=True)
class Centring:
    """Subtracts its mean from each block along an axis; a block of 0 is the whole axis,
    blocks of None are all.
    """

    axis: int
    block: int = 0
    blocks: tuple[int, ...] | None = None

    def where(self, x: torch.Tensor) -> tuple:
        """The arguments of `record.centre_` and `is_centred`."""
        block = self.block or x.shape[self.axis]
        return x, self.axis, block, self.blocks


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of the source: these rows of it, centred; without either, it keeps its
    bytes.
    """

    like: str
    rows: torch.Tensor | None = None
    centring: Centring | None = None

    @property
    def is_copy(self) -> bool:
        """Whether it is the source's tensor as it is."""
        return self.rows is None and self.centring is None

    def then(self, centring: Centring) -> Stored:
        """The tensor, centred."""
        return replace(self, centring=centring)

    def keys(self) -> set[str]:
        """The tensors of the source that it is made from."""
        return {self.like}

    def shape(self, source: Source) -> tuple[int, ...]:
        shape = tuple(source.tensors[self.like].shape)
        if self.rows is None:
            return shape
        return (len(self.rows), *shape[1:])

    def dtype(self, source: Source) -> torch.dtype:
        """The dtype that the result has it in."""
        if self.is_copy:
            return source.tensors[self.like].dtype
        return dtype_of_changed(self.like, source)

    def wide(self, source: Source) -> torch.Tensor:
        """The tensor in float64."""
        x = source.read(self.like, self.rows).double()
        if self.centring is not None:
            centre_(*self.centring.where(x))
        return x

    def value(self, source: Source) -> torch.Tensor:
        """The tensor in its own dtype."""
        x = source.read(self.like, self.rows)
        if self.centring is None:
            return x.to(self.dtype(source))
        # What an earlier conversion has centred, and training has not moved since,
        # keeps its bytes.
        if RECORD_KEY in source.config and is_centred(*self.centring.where(x)):
            return x.to(self.dtype(source))
        x = x.to(self.dtype(source))
        centre_(*self.centring.where(x))
        if not x.isfinite().all():
            raise self._not_finite(x.dtype, source)
        return x

    def _not_finite(self, dtype: torch.dtype, source: Source) -> BadTensor:
        if not source.read(self.like, self.rows).isfinite().all():
            what = f"NaN or infinity in {self.like!r}, as in the source"
            return BadTensor(f"{what}: repair that")
        kind = str(dtype).removeprefix("torch.")
        name = f"{self.like} ({kind})"
        what = f"centring takes {name!r} past the largest number of its dtype"
        return BadTensor(f"{what}: convert a bfloat16 copy")


def dtype_of_changed(key: str, source: Source) -> torch.dtype:
    """The dtype of a changed tensor: its own, or the wider one of config.json, in which
    the result is loaded.
    """
    stored = source.tensors[key]
    dtype = stored.dtype
    if dtype not in FLOATS.values():
        what = f"{key} is {getattr(stored, 'code', dtype)} and is to be changed"
        cure = "it is quantised; convert the unquantised model, then quantise that"
        raise ConversionError(f"{what}: {cure}")
    if is_narrower(dtype, source.dtype):
        return torch.promote_types(dtype, source.dtype)
    return dtype


def is_narrower(dtype: torch.dtype, other: torch.dtype | None) -> bool:
    """Whether a dtype of `FLOATS` rounds more than the other."""
    if other is None:
        return False
    return torch.finfo(dtype).eps > torch.finfo(other).eps


@dataclass(frozen=True, eq=False)
class Made:
    """A tensor that a function makes whole, in float64; its dtype and its shard are
    those of `like`.

    Args:
        parts: the tensors it is made from.
        shape, wide: functions of the source.
    """

    like: str
    parts: tuple[Stored | Made, ...]
    shape: Callable[[Source], tuple[int, ...]]
    wide: Callable[[Source], torch.Tensor]
    is_copy = False

    def keys(self) -> set[str]:
        return set().union(*(part.keys() for part in self.parts))

    def dtype(self, source: Source) -> torch.dtype:
        return dtype_of_changed(self.like, source)

    def value(self, source: Source) -> torch.Tensor:
        return self.wide(source).to(self.dtype(source))


Lazy = Stored | Made  # a tensor of a result, made when it is written


def filled(of: Lazy, number: float, axis: int = 0) -> Made:
    """A vector of one number, as long as another tensor is along an axis."""

    def shape(source: Source) -> tuple[int, ...]:
        return (of.shape(source)[axis],)

    def wide(source: Source) -> torch.Tensor:
        return torch.full(shape(source), number, dtype=torch.float64)

    return Made(of.like, (of,), shape, wide)


def plus(of: Lazy, number: float) -> Made:
    """A tensor with a number added: a norm's weight may be stored less one."""
    return Made(of.like, (of,), of.shape, lambda source: of.wide(source) + number)


def folded_bias(weight: Stored, shift: Stored, bias: Stored | None = None) -> Made:
    """The bias that a linear gets when a vector is added to its input: W shift + bias."""

    def shape(source: Source) -> tuple[int, ...]:
        return weight.shape(source)[:1]

    def wide(source: Source) -> torch.Tensor:
        added = shift.wide(source)
        pieces = weight.value(source).split(ROWS)
        total = torch.cat([piece.double() @ added for piece in pieces])
        if bias is not None:
            total += bias.wide(source)
        return total

    if bias is None:
        return Made(weight.like, (weight, shift), shape, wide)
    return Made(bias.like, (weight, shift, bias), shape, wide)


def computed(tensors: dict[str, Lazy], source: InMemory) -> dict[str, torch.Tensor]:
    """The tensors in memory."""
    values = {}
    for name, made in tensors.items():
        values[name] = made.value(source)
    return values
