"""From a module's answers to crafted inputs to the one formula that reproduces them bit
for bit.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...formula import GATES, ROUNDINGS, NormSpec
from ...fused.recipe import Recipe
from ...reference import reference_norm
from .check import prove
from .closeness import affine, close
from .inputs import ALL_BF16, ALL_FP32, Dtypes, Trial
from .plain_code import TORCH_FORWARDS
from .probe import OPEN_GATE, OnDevice, autocast
from .refusals import NotInFamily, Unusable

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Room for a float32 square root and its reciprocal, each rounded, when eps is read back
# from an output.
EPS_READING = 2e-6
SAME_DTYPES = (ALL_BF16, Dtypes(FP16, FP16, FP16))
MIXED_DTYPES = (Dtypes(FP32, BF16, FP32), Dtypes(BF16, FP32, BF16))
MIXED_GATES = (Dtypes(FP32, FP32, BF16), Dtypes(BF16, BF16, FP32))
EPS_OF_TORCH = torch.finfo(FP32).eps  # that of F.rms_norm, where none is given


class Fit(Trial):
    """Finds the recipe of one probed module, or raises why there is none."""

    def recipe(self) -> Recipe:
        self.find_input()
        try:
            return self._find_formula()
        except Unusable as error:
            # it normalises, so it is a norm, if one that fails on some inputs
            raise NotInFamily(str(error)) from error

    def _find_formula(self) -> Recipe:
        if self.head_dim is not None and self.group != self.head_dim:
            raise NotInFamily(
                "it normalises over more than the last dimension, or a part of it"
            )
        gate = self._find_needed_gate()
        recipe = self._find_operands()
        functional = self.device.calls_norm and not self.gate_required
        recipe = with_spec(recipe, functional=functional)
        recipe = self._find_eps(recipe)
        if gate is not None:
            recipe = replace(with_spec(recipe, gate=gate), gate=self.gate)
        recipe = self._find_rounding(recipe)
        if gate is None and self.gate is not None:
            recipe = self._find_optional_gate(recipe)
        if recipe.gate is not None:
            takes_both = self._agrees_in(recipe, MIXED_GATES)
            recipe = replace(recipe, one_gate_dtype=not takes_both)
        recipe = replace(recipe, asks_autocast=self._asks_autocast(recipe))
        recipe = self._with_settings(recipe)
        recipe = prove(self, recipe)
        if self.head_dim is not None:
            recipe = replace(with_spec(recipe, group_size=None), hidden_size=None)
        return recipe

    # One step of `recipe` each

    def _find_needed_gate(self) -> str | None:
        """Which gate, where one must be given; it is open in the runs until then."""
        if not self.gate_required:
            return None
        x = self.large_rows()
        gate = 3.0 * self.normal(*x.shape)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid / OPEN_GATE
        ungated = self.run(x)
        results = {
            "silu_after": ungated * silu,
            "sigmoid_after": ungated * sigmoid,
            # their product is normalised, so a constant gate changes nothing
            "silu_before": self.run(x * silu),
        }
        y = self.run(x, gate)
        for kind, result in results.items():
            if close(y, result, 1e-4):
                self.gate_kind = kind
                return kind
        raise NotInFamily(
            f"its second input, {self.gate!r}, is no gate that this package knows"
        )

    def _find_operands(self) -> Recipe:
        """The recipe but for eps and rounding."""
        x = self.large_rows()
        y = self.run(x).double()
        tensors = {}
        for name, tensor in self.tensors.items():
            if len(tensor) == self.size:
                tensors[name] = tensor.double()
        groups = {}
        if self.group != self.size:
            groups["group_size"] = self.group
        for centered in (False, True):
            spec = NormSpec(centered, 0.0, has_weight=False, **groups)
            hat = reference_norm(x.double(), None, None, spec)
            operands = affine(hat, y, tensors)
            if operands is not None:
                weight, bias, offset = operands
                has = weight is not None, bias is not None
                spec = NormSpec(centered, 0.0, *has, offset, **groups)
                size = self._fixed_size(weight)
                return Recipe(spec, weight, bias, hidden_size=size)
        raise NotInFamily("its formula is not one that this package knows")

    def _fixed_size(self, weight: str | None) -> int | None:
        if self.group != self.size:
            # longer rows may have larger groups, or more of them
            return self.size
        if weight is None:
            try:
                self.run(self.normal(4, self.size + 8))
            except Unusable:
                return self.size
        return None

    def _read_eps(self, recipe: Recipe, scale: float = 1e-12) -> float:
        """eps as the module's own output on rows of about that magnitude tells it, to
        about `EPS_READING`.
        """
        one = 1.0 - recipe.spec.weight_offset
        neutral = {recipe.weight: one, recipe.bias: 0.0}
        for name, tensor in self.tensors.items():
            value = neutral.get(name)
            if value is not None:
                tensor = torch.full_like(tensor, value)
            self.set(**{name: tensor})
        x = scale * (1.0 + self.normal(4, self.size))
        y = self.run(x)[0, : self.group].double()
        h = x[0, : self.group].double()
        if recipe.spec.centered:
            h = h - h.mean()
        without_eps = h.square().mean().item()
        rstd = (y * h).mean().item() / without_eps
        with_eps = rstd**-2
        if recipe.spec.eps_outside:
            without_eps = math.sqrt(without_eps)
            with_eps = 1 / rstd
        eps = with_eps - without_eps
        return 0.0 if abs(eps) <= 1e-5 * without_eps else eps

    def _find_eps(self, recipe: Recipe) -> Recipe:
        recipe, reading = self._place_eps(recipe)
        for name in self.attributes:
            value = getattr(self.module, name, None)
            if type(value) not in (int, float) or not _reads_as(reading, value):
                continue
            other = 2.0 * value + 1e-3
            self.set(**{name: other})
            is_eps = _reads_as(self._read_eps(recipe), other)
            self.set(**{name: value})
            if is_eps:
                recipe = with_spec(recipe, eps=float(value))
                return replace(recipe, eps=name, eps_value=value)
        in_short = float(f"{reading:.3g}")
        for value in (in_short, EPS_OF_TORCH):
            if _reads_as(reading, value):
                return with_spec(recipe, eps=value)
        raise NotInFamily(
            f"its eps, about {reading:.6g}, is fixed in its code and cannot be read exactly"
        )

    def _place_eps(self, recipe: Recipe) -> tuple[Recipe, float]:
        """(the recipe, with eps inside the root or beside it; eps as the output shows
        it, the same on rows of another magnitude).
        """
        for eps_outside in (False, True):
            recipe = with_spec(recipe, eps_outside=eps_outside)
            reading = self._read_eps(recipe)
            scale = reading if eps_outside else math.sqrt(abs(reading))
            if reading == 0.0:
                return recipe, reading
            again = self._read_eps(recipe, 0.5 * scale)
            if abs(again - reading) <= 1e-3 * reading:
                return recipe, reading
        raise NotInFamily("its eps is neither inside the root nor beside it")

    def _find_rounding(self, recipe: Recipe) -> Recipe:
        """The recipe with its rounding order; settles whether the module's results are
        to be equal to the last bit.
        """
        x = self.rows(4096)
        half_rows = self.rows(4096, half=True)
        dtypes = SAME_DTYPES
        if recipe.weight is not None and not recipe.spec.functional:
            dtypes += MIXED_DTYPES
        for candidate in _roundings(recipe):
            self._settle_exactness(candidate, x)
            if not self.exact and not self.agrees(candidate, x):
                raise NotInFamily(
                    f"its float32 results are not those of the formula it is closest to, {recipe.spec}"
                )
            if self.agrees(candidate, half_rows, dtypes):
                return candidate
        self._settle_exactness(recipe, x)
        mixed = dtypes[len(SAME_DTYPES) :]
        if not self.agrees(recipe, x, mixed[:1]):
            raise NotInFamily(
                f"it rounds to half precision in an order of its own; in float32 it is {recipe.spec}"
            )
        return replace(recipe, only_float32=True)

    def _settle_exactness(self, recipe: Recipe, x: Tensor) -> None:
        self.exact = True
        self.exact = self.agrees(recipe, x)

    def _find_optional_gate(self, recipe: Recipe) -> Recipe:
        """Whether a second input that need not be given is a gate, and of which kind."""
        dtypes = [ALL_FP32]
        if not recipe.only_float32:
            dtypes += [*SAME_DTYPES, *MIXED_DTYPES]
        for kind in GATES:
            gated = with_spec(recipe, gate=kind)
            gated = replace(gated, gate=self.gate, gate_optional=True)
            if self._agrees_in(gated, dtypes):
                return gated
        # a call that gives it runs the module's own forward
        return replace(recipe, other_input=self.gate)

    def _asks_autocast(self, recipe: Recipe) -> bool:
        """Whether the module may compute something else while autocast is on.

        Autocast casts nothing in arithmetic of float32, and the kernels follow it where
        it casts for torch's own norms.
        """
        if type(self.module).forward in TORCH_FORWARDS:
            return False
        if self.code.asks_autocast or not recipe.spec.functional:
            return self.code.asks_autocast
        dtypes = [ALL_FP32] if recipe.only_float32 else [ALL_FP32, *SAME_DTYPES]
        self.device = OnDevice("cuda")
        try:
            with autocast("cuda", BF16), OnDevice("cuda"):
                return not self._agrees_in(recipe, dtypes)
        finally:
            self.device = OnDevice("cpu")

    def _agrees_in(self, recipe: Recipe, dtypes: Iterable[Dtypes]) -> bool:
        x = self.rows(1024, half=True)
        with contextlib.suppress(Unusable):
            return self.agrees(recipe, x, dtypes)
        return False

    def _with_settings(self, recipe: Recipe) -> Recipe:
        """The recipe with what else the forward reads of the module: plain values,
        without which it may be another.
        """
        module = self.module
        settings = ()
        recipe = replace(recipe, absent=self.absent)
        known = {recipe.weight, recipe.bias, recipe.eps, *self.absent}
        for name in self.attributes:
            if name in known or not hasattr(module, name):
                continue
            value = getattr(module, name)
            if isinstance(value, Tensor):
                raise NotInFamily(
                    f"its forward reads its attribute {name!r}, which no formula here has"
                )
            if type(value) is int:
                # perhaps the length of its rows, or how many groups they have
                recipe = replace(recipe, hidden_size=self.size)
            match value:
                case () | (*_, self.size | self.head_dim):
                    continue  # a shape of its rows
            settings += ((name, value),)
        return replace(recipe, settings=settings)


def with_spec(recipe: Recipe, **changes) -> Recipe:
    return replace(recipe, spec=replace(recipe.spec, **changes))


def _roundings(recipe: Recipe) -> Iterator[Recipe]:
    """The recipe with every rounding order that its formula may have, the commonest
    first.
    """
    orders = ROUNDINGS
    if recipe.spec.functional and recipe.spec.group_size and recipe.weight is not None:
        # torch's own norms take no weight for each group
        orders = ("before_weight",)
    for rounding in orders:
        with contextlib.suppress(ValueError):
            yield with_spec(recipe, rounding=rounding)


def _reads_as(reading: float, value: float) -> bool:
    is_near = abs(reading - value) <= EPS_READING * abs(value)
    return math.isfinite(value) and is_near
