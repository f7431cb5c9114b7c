"""The inputs of a probed module: rows for which formulas differ, in the layout that the
module normalises; and whether a formula gives its results for them.
"""

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ...fused.recipe import Recipe
from ...kernels.sizes import MAX_HIDDEN_SIZE
from ...reference import reference_norm
from .closeness import close, nearly
from .plain_code import Code
from .probe import Probe
from .refusals import NotInFamily, Unusable

# (scale, mean) of the rows that a formula is tried on: some plain, some with a large
# mean, some so small that eps rules.
ROWS = [(1, 0.1), (30, -100), (0.02, 0.3), (3e-4, 1e-3), (1, 8), (0, 0)]
# and some of the smallest and largest numbers
EXTREMES = [(1e-12, 1e-12), (1e12, 0)]
HALF_EXTREMES = [(1e-4, 1e-4), (1e3, 0)]
CHANNELS_FIRST = "it normalises over dimension 1: its input is copied first, so a kernel gains nothing here"


class Dtypes(NamedTuple):
    """The dtypes of a run."""

    x: torch.dtype = torch.float32
    weight: torch.dtype = torch.float32
    gate: torch.dtype = torch.float32


ALL_FP32 = Dtypes()
ALL_BF16 = Dtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16)


class Trial(Probe):
    """A probed module with the inputs and tensors that it is tried with.

    Attributes:
        code: the forward, as its source shows it.
        attributes: names of those that it reads.
        size, group: the length of a row; how many elements of it are normalised
            together.
        tensors: values of the module's tensors, as rows.
        exact: whether results are to be equal to the last bit, or only `nearly`.
    """

    def __init__(self, module: Module, code: Code):
        super().__init__(module)
        code.read()
        self.code = code
        self.attributes = sorted(self.code.attributes)
        self.generator = torch.Generator().manual_seed(0)
        self.size = self.group = 0
        self.tensors: dict[str, Tensor] = {}
        self.exact = True

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32)

    def rows(self, elements: int, half: bool = False) -> Tensor:
        """Rows of about so many elements: those of `ROWS`, of the smallest and largest
        numbers, and with an outlier.
        """
        kinds = ROWS + (HALF_EXTREMES if half else EXTREMES)
        scale, mean = torch.tensor(kinds, dtype=torch.float32).unsqueeze(2).unbind(1)
        of_each_kind = len(kinds) * self.size
        repeats = math.ceil(elements / of_each_kind)
        x = self.normal(repeats, len(kinds), self.size) * scale + mean
        x[:, 0, self.size // 2] = 300.0
        return x.flatten(0, 1)

    def gates(self, x: Tensor) -> Tensor:
        """Gates for x, from closed to wide open."""
        return 8.0 * self.normal(*x.shape) ** 3

    def draw_tensors(self, uneven: bool = False) -> None:
        """Give the module other tensors; if `uneven`, with elements that are large,
        tiny, negative or zero.
        """
        for name, shape in self.shapes.items():
            size = shape.numel() or self.size  # a shard of FSDP may be empty
            tensor = 0.7 + 0.4 * self.normal(size)
            if uneven:
                chance = self.normal(size)
                tensor[chance > 1.0] *= -30.0
                tensor[chance < -1.0] *= 1e-3
                tensor[chance < -1.5] = 0.0
            self.tensors[name] = tensor
        self.set(**self.tensors)

    def find_input(self) -> None:
        """Settle how rows are put to the module and how long they are: the first way in
        which it normalises them.
        """
        layouts = [(-1, 3), (1, 4)]
        if self.head_dim:
            layouts = [(-1, 4)]
        failures = []
        # a forward may need its second input though None is that input's default
        gates = dict.fromkeys((self.gate_required, self.gate is not None))
        ways = itertools.product(gates, layouts, self._row_sizes())
        for self.gate_required, (self.row_dim, self.dims), self.size in ways:
            try:
                self._try_input()
            except Unusable as error:
                failures.append(error)
                continue
            if self.row_dim == 1:
                raise NotInFamily(CHANNELS_FIRST)
            return
        raise failures[0]

    def _row_sizes(self) -> list[int]:
        """The lengths that a row may have, the likeliest first: those of the weights,
        or what attributes name.
        """
        sizes = {shape.numel() for shape in self.shapes.values()} - {0}
        if sizes:
            return sorted(sizes, reverse=True)
        named = []
        for name in self.attributes:
            value = getattr(self.module, name, None)
            if isinstance(value, tuple) and value:
                value = value[-1]  # as in `normalized_shape`
            if type(value) is int and 1 < value <= MAX_HIDDEN_SIZE:
                named.append(value)
        return [*named, 64]

    def _try_input(self) -> None:
        """Scaling a row must not change its result, other rows must not matter, the
        row's own elements must.
        """
        self.draw_tensors()
        x = 1e4 * (self.normal(4, self.size) + 0.5)  # so that eps is nothing
        y = self.run(x)
        scales = torch.tensor([[1], [2], [64], [1024]])
        y_scaled = self.run(x * scales)
        moved = x.clone()
        # so that the sign of a difference changes, all that a row of two may show
        moved[0, 0] = 2 * x[0, -1] - x[0, 0]
        changed = self.run(moved) != y
        in_row, others = changed[0], changed[1:]
        is_norm = close(y_scaled, y, 1e-3) and in_row[1:].any()
        if not is_norm or others.any():
            raise Unusable("it does not normalise over the last dimension")
        last = in_row.nonzero().max()
        self.group = int(last) + 1

    def agrees(
        self, recipe: Recipe, x: Tensor, dtypes: Iterable[Dtypes] = (ALL_FP32,)
    ) -> bool:
        """Whether module and formula give the same on x, in all these `Dtypes`."""
        for each in dtypes:
            self.draw_tensors(uneven=True)
            rows = x.to(each.x)
            gate = None
            if recipe.gate is not None:
                gate = self.gates(x).to(each.gate)
            tensors = {n: tensor.to(each.weight) for n, tensor in self.tensors.items()}
            self.set(**tensors)
            y = self.run(rows, gate)
            if not is_formula(y, recipe, rows, tensors, gate, self.exact):
                return False
        return True


def is_formula(
    y: Tensor, recipe: Recipe, x: Tensor, tensors: dict, gate, exact: bool = False
) -> bool:
    """Whether a module's result is the formula's of these operands, to the last bit or
    `nearly`.
    """
    weight = tensors.get(recipe.weight)
    bias = tensors.get(recipe.bias)
    expected = reference_norm(x, weight, bias, recipe.spec, gate)
    if y.dtype != expected.dtype:
        return False
    if torch.allclose(y, expected, rtol=0.0, atol=0.0, equal_nan=True):
        return True
    return not exact and nearly(y, expected, x, weight, bias, recipe.spec)
