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
from .plan import BadTensor, Centre, ConversionError

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

    def read(self, name: str) -> torch.Tensor:
        """A copy of a tensor."""
        return self.tensors[name].detach().clone()


Source = Checkpoint | InMemory


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of the source: these rows of it, centred; without either, it keeps its
    dtype and its bytes.
    """

    like: str
    rows: torch.Tensor | None = None
    step: Centre | None = None

    def then(self, step: Centre) -> Stored:
        """The tensor, centred."""
        return replace(self, step=step)

    def keys(self) -> set[str]:
        """The tensors of the source that it is made from."""
        return {self.like}

    def shape(self, source: Source) -> tuple[int, ...]:
        shape = tuple(source.tensors[self.like].shape)
        if self.rows is None:
            return shape
        count = len(self.rows)
        return (count, *shape[1:])

    def dtype(self, source: Source) -> torch.dtype:
        """The dtype that the result has it in."""
        if self.rows is None and self.step is None:
            return source.tensors[self.like].dtype
        return dtype_of_changed(self.like, source)

    def wide(self, source: Source) -> torch.Tensor:
        """The tensor in float64."""
        x = self._read(source).double()
        if self.step is not None:
            centre_(x, **self.step.how)
        return x

    def value(self, source: Source) -> torch.Tensor:
        """The tensor in its own dtype."""
        dtype = self.dtype(source)
        x = self._read(source).to(dtype)
        if self.step is None:
            return x
        # What an earlier conversion has centred, and training has not moved since,
        # keeps its bytes.
        if RECORD_KEY in source.config and is_centred(x, **self.step.how):
            return x
        centre_(x, **self.step.how)
        if not _is_finite(x):
            raise self._not_finite(source)
        return x

    def _read(self, source: Source) -> torch.Tensor:
        x = source.read(self.like)
        if self.rows is None:
            return x
        return x[self.rows]

    def _not_finite(self, source: Source) -> BadTensor:
        if not _is_finite(self._read(source)):
            return BadTensor(
                f"NaN or infinity in {self.like!r}, as in the source: repair that"
            )
        kind = str(self.dtype(source)).removeprefix("torch.")
        return BadTensor(
            f"centring takes '{self.like} ({kind})' past the largest number of its "
            "dtype: convert a bfloat16 copy"
        )


def _is_finite(x: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite."""
    if not x.numel():
        return True
    # NaN is both the least and the largest; isfinite takes 17 times as long
    least, largest = x.aminmax()
    return bool(least.isfinite() & largest.isfinite())


def dtype_of_changed(key: str, source: Source) -> torch.dtype:
    """The dtype of a changed tensor: its own, or the wider one of config.json, in which
    the result is loaded.
    """
    stored = source.tensors[key]
    dtype = stored.dtype
    if dtype not in FLOATS:
        raise ConversionError(
            f"{key} is {dtype} and is to be changed: it is quantised; convert the "
            "unquantised model, then quantise that"
        )
    if is_narrower(dtype, source.dtype):
        return torch.promote_types(dtype, source.dtype)
    return dtype


def is_narrower(dtype: torch.dtype, other: torch.dtype | None) -> bool:
    """Whether a dtype of `FLOATS` rounds more than the other."""
    if other is None:
        return False
    eps = torch.finfo(dtype).eps
    return eps > torch.finfo(other).eps


@dataclass(frozen=True, eq=False)
class Made:
    """A vector that a function makes in float64; its dtype and its shard are those of
    `like`.

    Args:
        parts: the tensors it is made from; it is as long as the first along `axis`.
        wide: a function of the source.
    """

    like: str
    parts: tuple[Stored | Made, ...]
    wide: Callable[[Source], torch.Tensor]
    axis: int = 0

    def keys(self) -> set[str]:
        keys = set()
        for part in self.parts:
            keys |= part.keys()
        return keys

    def shape(self, source: Source) -> tuple[int, ...]:
        shape = self.parts[0].shape(source)
        return (shape[self.axis],)

    def dtype(self, source: Source) -> torch.dtype:
        return dtype_of_changed(self.like, source)

    def value(self, source: Source) -> torch.Tensor:
        dtype = self.dtype(source)
        return self.wide(source).to(dtype)


Lazy = Stored | Made  # a tensor of a result, made when it is written


def filled(of: Lazy, number: float, axis: int = 0) -> Made:
    """A vector of one number, as long as another tensor is along an axis."""

    def wide(source: Source) -> torch.Tensor:
        shape = of.shape(source)
        length = shape[axis]
        return torch.full((length,), number, dtype=torch.float64)

    return Made(of.like, (of,), wide, axis)


def plus(of: Lazy, number: float) -> Made:
    """A vector with a number added: a norm's weight may be stored less one."""

    def wide(source: Source) -> torch.Tensor:
        return of.wide(source) + number

    return Made(of.like, (of,), wide)


def folded_bias(weight: Stored, shift: Stored, bias: Stored | None = None) -> Made:
    """The bias that a linear gets when a vector is added to its input: W shift + bias."""

    def wide(source: Source) -> torch.Tensor:
        added = shift.wide(source)
        matrix = weight.value(source)
        pieces = []
        for piece in matrix.split(ROWS):
            pieces.append(piece.double() @ added)
        total = torch.cat(pieces)
        if bias is not None:
            total += bias.wide(source)
        return total

    if bias is None:
        return Made(weight.like, (weight, shift), wide)
    return Made(bias.like, (weight, shift, bias), wide)


def computed(tensors: dict[str, Lazy], source: InMemory) -> dict[str, torch.Tensor]:
    """The tensors in memory."""
    return {name: made.value(source) for name, made in tensors.items()}
