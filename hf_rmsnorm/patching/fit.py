"""From a module's answers to crafted inputs to the one formula that reproduces them bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from ..formula import ROUNDINGS, NormSpec
from ..layers import Recipe
from ..ops.backend import MAX_HIDDEN_SIZE
from ..reference import reference_norm
from .compare import close, nearly, same_bits
from .lookalikes import describe
from .probe import Probe, Unusable, own_tensors, plain_attributes

# Room for a float32 square root and its reciprocal, each rounded, when eps is read back from an output.
EPS_READING = 2e-6
SAME_DTYPES = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16))
MIXED_DTYPES = ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16))
MACHINE_EPS = tuple(torch.finfo(d).eps for d in (torch.float32, torch.float16, torch.bfloat16, torch.float64))


class NotInFamily(Exception):
    """The module normalises over its last dimension by a formula that `NormSpec` cannot say."""


class NotANorm(Exception):
    """The module does not normalise over the last dimension of its input."""


class Fit:
    """Finds the recipe of one probed module.

    `recipe()` raises `NotANorm`, `NotInFamily` or `Unusable` where there is none.
    """

    def __init__(self, probe: Probe):
        self.probe = probe
        self.generator = torch.Generator().manual_seed(0)
        self.size = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.functional = False

    def recipe(self) -> Recipe:
        self._find_size()
        self._check_normalises()
        try:
            recipe = None if self.probe.faults else self._find_formula()
        except Unusable as error:  # it normalises, so it is a norm, if one that fails on some inputs
            raise NotInFamily(str(error)) from error
        if self.probe.faults:
            raise NotInFamily("; ".join(self.probe.faults))
        return recipe

    def _find_formula(self) -> Recipe:
        self._find_functional()
        centered, weight, bias, offset = self._find_structure()
        spec = NormSpec(centered, 0.0, weight is not None, bias is not None, offset, functional=self.functional)
        recipe = Recipe(spec, weight, bias, hidden_size=self._fixed_size(weight))
        recipe = self._find_eps(recipe)
        recipe = self._check_other_attributes(recipe)
        recipe, exact = self._find_rounding(recipe)
        self._verify(recipe, exact)
        return recipe

    # Inputs

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float32)

    def _rows(self, minimum: int = 0, half: bool = False) -> torch.Tensor:
        """(rows, hidden_size) float32 rows that tell formulas apart.

        Plain rows, rows with a large mean, rows so small that eps rules, large ones, one outlier, and zeros.
        """
        small, large = (1e-4, 1e3) if half else (1e-12, 1e12)
        scales = torch.tensor([1.0, 1.0, 30.0, 0.02, 1e-3, 3e-4, small, large, 1.0, 2.0, 1.0, 0.0], dtype=torch.float32)
        means = torch.tensor([0.0, 0.1, -100.0, 0.3, 0.0, 1e-3, small, 0.0, 8.0, -0.5, 0.0, 0.0], dtype=torch.float32)
        repeats = max(1, math.ceil(minimum / (len(scales) * self.size)))
        x = self._normal(repeats, len(scales), self.size) * scales[:, None] + means[:, None]
        x[:, 10, self.size // 2] = 300.0
        return x.flatten(0, 1)

    def _randomise(self) -> None:
        for name, size in self.probe.sizes.items():
            self.tensors[name] = 0.7 + 0.4 * self._normal(size or self.size)
        self.probe.set(**self.tensors)

    # One step of `recipe` each

    def _find_size(self) -> None:
        """Settle the length of the last dimension: the first that the forward accepts."""
        sizes = sorted({size for size in self.probe.sizes.values() if size}, reverse=True)
        if not sizes:
            sizes = [*_hinted_sizes(self.probe), 64]
        if max(sizes) > MAX_HIDDEN_SIZE:
            raise Unusable(f"its hidden size is above {MAX_HIDDEN_SIZE}")
        failure = None
        for self.size in sizes:
            self._randomise()
            x = self._normal(2, 3, self.size)
            try:
                y, _ = self.probe.run_watched(x)
            except Unusable as error:
                failure = failure or error
                continue
            if not same_bits(y, self.probe.run(x)):
                self.probe.faults.append("two calls on the same input differ")
            return
        raise failure

    def _find_functional(self) -> None:
        """Whether torch's own operator does it all; asked in bfloat16, where a cast to float32 around it shows."""
        self.probe.set(**{name: tensor.bfloat16() for name, tensor in self.tensors.items()})
        _, self.functional = self.probe.run_watched(self._normal(2, self.size).bfloat16())
        self.probe.set(**self.tensors)

    def _check_normalises(self) -> None:
        """Scaling a row must not change its result, other rows must not matter, the row's own elements must."""
        x = 1e4 * (self._normal(2, 2, self.size) + 0.5)
        y = self.probe.run(x)
        if not y.isfinite().all():
            raise NotInFamily("it gives NaN or infinity on ordinary input" + self._strange_numbers())
        scales = torch.tensor([1.0, 2.0, 64.0, 1024.0], dtype=torch.float32).view(2, 2, 1)
        scaled = self.probe.run(x * scales)
        if not close(scaled, y, 1e-3):
            if close(self.probe.run(x * 1024), y, 1e-3):
                raise NotANorm("it normalises over another dimension than the last")
            raise NotANorm(describe(self.probe, x, y) or "it does not normalise over the last dimension")
        moved = x.clone()
        moved[0, 0, 0] += 3e4
        change = (self.probe.run(moved) != y).flatten(0, 1)
        if change[1:].any():
            raise NotANorm("the result of a row depends on other rows")
        if self.size > 1 and not change[0, 1:].any():
            raise NotANorm("it does not normalise over the last dimension" + self._strange_numbers())

    def _strange_numbers(self) -> str:
        strange = [f"{name} is {value}" for name, value in self.probe.numbers.items() if not 0 <= value < math.inf]
        return ": " + ", ".join(strange) if strange else ""

    def _find_structure(self) -> tuple[bool, str | None, str | None, float]:
        """(centered, weight attribute, bias attribute, weight offset), from rows so large that eps is nothing."""
        x = 1e4 * (self._normal(2, 2, self.size) + 0.5)
        y = self.probe.run(x).double()
        names = [name for name, tensor in self.tensors.items() if tensor.shape[0] == self.size]
        for centered, weight, bias in itertools.product((False, True), [None, *names], [None, *names]):
            if bias is not None and bias == weight:
                continue
            h = x.double()
            h = h - h.mean(-1, keepdim=True) if centered else h
            h = h * h.pow(2).mean(-1, keepdim=True).rsqrt()
            shift = 0.0 if bias is None else self.tensors[bias].double()
            for offset in (0.0, 1.0) if weight else (0.0,):
                scale = 1.0 if weight is None else self.tensors[weight].double() + offset
                if close(h * scale + shift, y, 2e-5):
                    return centered, weight, bias, offset
        raise NotInFamily(describe(self.probe, x, y) or "its formula is not one that this package knows")

    def _fixed_size(self, weight: str | None) -> int | None:
        if weight is not None:
            return None
        try:
            self.probe.run(self._normal(2, self.size + 8))
        except Unusable:
            return self.size
        return None

    def _read_eps(self, recipe: Recipe, scale: float = 1e-12) -> float:
        """eps as the module's own output on rows of about that magnitude tells it, to about `EPS_READING`."""
        neutral = {}
        if recipe.weight:
            neutral[recipe.weight] = torch.full((self.size,), 1.0 - recipe.spec.weight_offset, dtype=torch.float32)
        if recipe.bias:
            neutral[recipe.bias] = torch.zeros(self.size, dtype=torch.float32)
        self.probe.set(**neutral)
        x = scale * (1.0 + self._normal(1, self.size))
        y = self.probe.run(x).double()
        self.probe.set(**{name: self.tensors[name] for name in neutral})
        h = x.double()
        h = h - h.mean() if recipe.spec.centered else h
        rstd = (y * h).sum() / (h * h).sum()
        square = h.pow(2).mean().item()
        eps = rstd.item() ** -2 - square if rstd else math.inf
        return 0.0 if abs(eps) <= 1e-5 * square else eps

    def _find_eps(self, recipe: Recipe) -> Recipe:
        reading = self._read_eps(recipe)
        if not (math.isfinite(reading) and reading >= 0.0):
            raise NotInFamily("its eps is negative or not a number" + self._strange_numbers())
        if reading and abs(self._read_eps(recipe, 0.5 * math.sqrt(reading)) - reading) > 1e-3 * reading:
            raise NotInFamily(f"its eps is not inside the root, as in x / (RMS + eps): about {math.sqrt(reading):.3g}")
        for name, value in self.probe.numbers.items():
            if _reads_as(reading, value) and self._drives_eps(recipe, name, 2.0 * value + 1e-3):
                return replace(recipe, spec=recipe.spec.with_eps(float(value)), eps=name, eps_value=value)
        for value in (float(f"{reading:.3g}"), *MACHINE_EPS):
            if _reads_as(reading, value):
                recipe = replace(recipe, spec=recipe.spec.with_eps(value))
                unset = [k for k, v in plain_attributes(self.probe.module).items() if v is None and self.functional]
                for name in unset:  # F.rms_norm has a default of its own for eps=None
                    if self._drives_eps(recipe, name, 1e-3):
                        return replace(recipe, eps=name)
                return recipe
        raise NotInFamily(f"its eps, about {reading:.6g}, is fixed in its code and cannot be read exactly")

    def _drives_eps(self, recipe: Recipe, name: str, other: float) -> bool:
        value = getattr(self.probe.module, name)
        self.probe.set(**{name: other})
        try:
            return _reads_as(self._read_eps(recipe), other)
        except Unusable:
            return False
        finally:
            self.probe.set(**{name: value})

    def _check_other_attributes(self, recipe: Recipe) -> Recipe:
        """No other number or tensor may matter: only what the recipe names is read at run time, flags included."""
        x = self._rows()
        y = self.probe.run(x)
        trained = self._run_in_mode(True, x)
        self.probe.module.training = False
        if not same_bits(trained, y):
            raise NotInFamily("it computes something else in train mode")
        others = {name: 2.0 * value + 0.125 for name, value in self.probe.numbers.items() if isinstance(value, float)}
        others |= {name: 2.0 * t + 0.125 for name, t in own_tensors(self.probe.module)}
        for name in sorted(others.keys() - {recipe.weight, recipe.bias, recipe.eps}):
            if self._matters(name, others[name], x, y):
                raise NotInFamily(f"its result depends on its attribute {name!r}, which no formula here has")
        flags = {k: v for k, v in plain_attributes(self.probe.module).items() if isinstance(v, bool)}
        settings = tuple((name, flag) for name, flag in flags.items() if self._matters(name, not flag, x, y))
        return replace(recipe, settings=settings)

    def _matters(self, name: str, value, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether another value of an attribute changes the result y of x, in train mode or not."""
        before = getattr(self.probe.module, name)
        self.probe.set(**{name: value})
        try:
            return not all(same_bits(self._run_in_mode(training, x), y) for training in (False, True))
        except Unusable:
            return True
        finally:
            self.probe.module.training = False
            self.probe.set(**{name: before})

    def _run_in_mode(self, training: bool, x: torch.Tensor) -> torch.Tensor:
        self.probe.module.training = training
        return self.probe.run_watched(x)[0]

    def _find_rounding(self, recipe: Recipe) -> tuple[Recipe, bool]:
        """The rounding order, and whether float32 results are equal to the formula's to the last bit."""
        x = self._rows()
        exact = self._agrees(recipe, x, torch.float32, torch.float32, exact=True)
        if not exact and not self._agrees(recipe, x, torch.float32, torch.float32, exact=False):
            raise NotInFamily("its float32 results are not those of the formula it is closest to, " + str(recipe.spec))
        explicit = recipe.weight is not None and not self.functional
        x = self._rows(4096, half=True)
        for rounding in ROUNDINGS if explicit else ("once",):
            candidate = replace(recipe, spec=replace(recipe.spec, rounding=rounding))
            if all(self._agrees(candidate, x, *dtypes, exact) for dtypes in SAME_DTYPES + MIXED_DTYPES * explicit):
                return candidate, exact
        raise NotInFamily(f"it rounds to half precision in an order of its own; in float32 it is {recipe.spec}")

    def _agrees(self, recipe: Recipe, x, x_dtype, weight_dtype, exact: bool) -> bool:
        """Whether module and formula give the same on x."""
        x = x.to(x_dtype)
        values = {name: tensor.to(weight_dtype) for name, tensor in self.tensors.items()}
        weight, bias = values.get(recipe.weight), values.get(recipe.bias)
        self.probe.set(**values)
        y = self.probe.run(x)
        self.probe.set(**self.tensors)
        expected = reference_norm(x, weight, bias, recipe.spec)
        if exact or y.dtype != expected.dtype:
            return same_bits(y, expected)
        return nearly(y, expected, x, weight, bias, recipe.spec)

    def _verify(self, recipe: Recipe, exact: bool) -> None:
        """Shapes, strides, NaN, autocast and gradients: everything a model will ask of the swapped forward."""
        for dtype in (torch.float32, torch.bfloat16):
            self._randomise()
            rows = self._rows(half=dtype == torch.bfloat16)
            three, four = rows[3:9].view(2, 3, -1), rows.view(3, 2, 2, -1).transpose(1, 2)
            for x in (rows[:5], rows[None, :1], three, four):
                if not self._agrees(recipe, x, dtype, dtype, exact):
                    raise NotInFamily(f"on {x.dim()}-dimensional input its result is not that of {recipe.spec}")
            self._verify_autocast(recipe, three, dtype, exact)
        self._verify_strange_input(recipe)
        self._verify_gradients(recipe)

    def _verify_strange_input(self, recipe: Recipe) -> None:
        values = [self.tensors.get(recipe.weight), self.tensors.get(recipe.bias), recipe.spec]
        x = self._rows()
        x[1, 0], x[2, -1] = math.nan, math.inf
        if not torch.equal(self.probe.run(x).isnan(), reference_norm(x, *values).isnan()):
            raise NotInFamily("it treats NaN and infinity in a way of its own")
        five = self._rows().view(3, 2, 2, 1, -1)
        try:
            y = self.probe.run(five)
        except Unusable:  # such input never reaches a forward that refuses it
            return
        if not close(y.nan_to_num(), reference_norm(five, *values).nan_to_num(), 1e-3):
            raise NotInFamily(f"on 5-dimensional input its result is not that of {recipe.spec}")

    def _verify_autocast(self, recipe: Recipe, x: torch.Tensor, dtype: torch.dtype, exact: bool) -> None:
        self.probe.set(**{name: tensor.to(dtype) for name, tensor in self.tensors.items()})
        watched = [self.probe.run_watched(x.to(dtype))[1]]
        agrees = True
        for device_type in ("cpu", "cuda"):
            with _autocast(device_type):
                self.probe.set(**{name: tensor.to(dtype) for name, tensor in self.tensors.items()})
                watched.append(self.probe.run_watched(x.to(dtype))[1])
                agrees = agrees and self._agrees(recipe, x, dtype, dtype, exact)
        if len(set(watched)) > 1 or not agrees:
            raise NotInFamily("it computes something else under autocast")

    def _verify_gradients(self, recipe: Recipe) -> None:
        names = [name for name in (recipe.weight, recipe.bias) if name]
        x = self._normal(3, self.size)
        x = (x + 0.5 * x.sign()).requires_grad_()
        dy = self._normal(3, self.size)
        leaves = {name: self.tensors[name].clone().requires_grad_() for name in names}
        with torch.enable_grad():
            expected = torch.autograd.grad(
                reference_norm(x, leaves.get(recipe.weight), leaves.get(recipe.bias), recipe.spec),
                [x, *leaves.values()],
                dy,
            )
            self.probe.set(**leaves)
            y = self.probe.run(x)
            inputs = [x, *(getattr(self.probe.module, name) for name in names)]
            try:
                got = torch.autograd.grad(y, inputs, dy)
            except RuntimeError as error:
                raise NotInFamily("its output is cut off from the gradient") from error
        self.probe.set(**self.tensors)
        for name, a, b in zip(["input", *names], got, expected, strict=True):
            if not close(a, b, 1e-4, floor=1.0):
                raise NotInFamily(f"its gradient with respect to its {name} is not that of {recipe.spec}")


def _hinted_sizes(probe: Probe) -> list[int]:
    """Sizes that a module without weights names in its attributes, `normalized_shape` and the like."""
    hints = [value for value in probe.numbers.values() if isinstance(value, int)]
    for value in vars(probe.module).values():
        if isinstance(value, (tuple, list)) and value and isinstance(value[-1], int):
            hints.append(value[-1])
    return list(dict.fromkeys(h for h in hints if 1 <= h <= MAX_HIDDEN_SIZE))


def _reads_as(reading: float, value: float) -> bool:
    return abs(reading - value) <= EPS_READING * abs(value)


@contextlib.contextmanager
def _autocast(device_type: str) -> Iterator[None]:
    """What code that asks whether autocast is on would find, on a machine without that device too."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])
