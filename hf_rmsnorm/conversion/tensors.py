"""How each tensor of a result is made: read from the source, changed in float64 slice
by slice, and rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from ..record import RECORD_KEY, is_centred
from .checkpoint.source import FLOATS, Checkpoint
from .plan import BadTensor, ConversionError

SLICE = 1 << 18
"""Elements that are in float64 at a time: 2 MiB, which stay in the cache."""


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

    def apply(self, x: torch.Tensor, source: Source) -> None:
        rows = x.unflatten(self.axis, (-1, self.block or x.shape[self.axis]))
        for part in (
            [rows]
            if self.blocks is None
            else [rows.narrow(self.axis, i, 1) for i in self.blocks]
        ):
            part -= part.mean(self.axis + 1, keepdim=True)

    def changes(self, x: torch.Tensor, source: Source) -> bool:
        return not is_centred(
            x, self.axis, self.block or x.shape[self.axis], self.blocks
        )


@dataclass(frozen=True)
class Scaling:
    """Multiplies by a vector along an axis."""

    axis: int
    by: Stored | Made

    def apply(self, x: torch.Tensor, source: Source) -> None:
        x.movedim(self.axis, -1).mul_(self.by.wide(source))

    def changes(self, x: torch.Tensor, source: Source) -> bool:
        return bool((self.by.wide(source) != 1).any())


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor of the source: these rows of it, after these steps; without any, it
    keeps its bytes.
    """

    like: str
    rows: torch.Tensor | None = None
    steps: tuple[Centring | Scaling, ...] = ()

    @property
    def is_copy(self) -> bool:
        """Whether it is the source's tensor as it is."""
        return self.rows is None and not self.steps

    def then(self, *steps: Centring | Scaling) -> Stored:
        """The tensor after further steps."""
        return replace(self, steps=(*self.steps, *steps))

    def keys(self) -> set[str]:
        """The tensors of the source that it is made from."""
        return {self.like}.union(
            *(step.by.keys() for step in self.steps if isinstance(step, Scaling))
        )

    def shape(self, source: Source) -> tuple[int, ...]:
        shape = tuple(source.tensors[self.like].shape)
        return shape if self.rows is None else (len(self.rows), *shape[1:])

    def slices(
        self, source: Source, x: torch.Tensor | None = None
    ) -> Iterator[tuple[tuple, torch.Tensor]]:
        """(place, float64 values) of the tensor, along an axis that no step runs along,
        if any.
        """
        x = source.read(self.like, self.rows) if x is None else x
        taken = {step.axis for step in self.steps}
        free = [axis for axis in range(x.dim()) if axis not in taken]
        split = max(free, key=lambda axis: x.shape[axis], default=None)
        count = 1 if split is None else x.shape[split]
        length = max(1, SLICE * count // max(1, x.numel()))
        for start in range(0, count, length):
            part = slice(start, start + length)
            place = tuple(
                part if axis == split else slice(None) for axis in range(x.dim())
            )
            wide = x[place].to(torch.float64, copy=True)
            for step in self.steps:
                step.apply(wide, source)
            yield place, wide

    def wide(self, source: Source) -> torch.Tensor:
        """The tensor in float64."""
        x = source.read(self.like, self.rows)
        whole = torch.empty_like(x, dtype=torch.float64)
        for place, part in self.slices(source, x):
            whole[place] = part
        return whole

    def dtype(self, source: Source) -> torch.dtype:
        """The dtype that the result has it in."""
        return (
            source.tensors[self.like].dtype
            if self.is_copy
            else dtype_of_changed(self.like, source)
        )

    def value(self, source: Source) -> torch.Tensor:
        """The tensor in its own dtype."""
        x, dtype = source.read(self.like, self.rows), self.dtype(source)
        # A tensor that an earlier conversion has centred, and that training has not
        # moved since, keeps its bytes.
        is_done = RECORD_KEY in source.config and not any(
            step.changes(x, source) for step in self.steps
        )
        if x.dtype != dtype or (self.steps and not is_done):
            return self._rounded(x, dtype, source)
        return x

    def _rounded(
        self, x: torch.Tensor, dtype: torch.dtype, source: Source
    ) -> torch.Tensor:
        made = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
        for place, wide in self.slices(source, x):
            narrow = made[place]
            narrow.copy_(wide)
            # The sum, which is quick, is finite for most tensors that are.
            if not bool(narrow.sum().isfinite()) and not bool(narrow.isfinite().all()):
                raise BadTensor(_not_finite(self.like, wide, dtype))
        return made


def dtype_of_changed(key: str, source: Source) -> torch.dtype:
    """The dtype of a changed tensor: its own, or the wider one of config.json, in which
    the result is loaded.
    """
    stored = source.tensors[key]
    dtype = stored.dtype
    if dtype not in FLOATS.values():
        cure = "it is quantised; convert the unquantised model, then quantise that"
        raise ConversionError(
            f"{key} is {getattr(stored, 'code', dtype)} and is to be changed: {cure}"
        )
    return (
        torch.promote_types(dtype, source.dtype)
        if is_narrower(dtype, source.dtype)
        else dtype
    )


def is_narrower(dtype: torch.dtype, other: torch.dtype | None) -> bool:
    """Whether a dtype of `FLOATS` rounds more than the other."""
    return other is not None and torch.finfo(dtype).eps > torch.finfo(other).eps


def _not_finite(key: str, wide: torch.Tensor, dtype: torch.dtype) -> str:
    if wide.isnan().any():  # as the mean is too, of infinities
        return f"NaN or infinity in {key!r}, as in the source: repair that"
    name = str(dtype).removeprefix("torch.")
    return f"centring takes '{key} ({name})' past the largest number of its dtype: convert a bfloat16 copy"


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


def folded_bias(weight: Stored, shift: Lazy, bias: Lazy | None = None) -> Made:
    """The bias that a linear gets when a vector is added to its input: W shift + bias."""

    def shape(source: Source) -> tuple[int, ...]:
        return weight.shape(source)[:1]

    def wide(source: Source) -> torch.Tensor:
        added = shift.wide(source)
        total = torch.zeros(shape(source), dtype=torch.float64)
        for (rows, columns), part in weight.slices(source):
            total[rows] += part @ added[columns]
        return total if bias is None else total + bias.wide(source)

    parts = (weight, shift) if bias is None else (weight, shift, bias)
    return Made((bias or weight).like, parts, shape, wide)


def computed(tensors: dict[str, Lazy], source: InMemory) -> dict[str, torch.Tensor]:
    """The tensors in memory."""
    return {name: made.value(source) for name, made in tensors.items()}
