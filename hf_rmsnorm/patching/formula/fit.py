"""Tries one formula after the other until one reproduces a module's results bit for bit.

`recognise` calls `Fit.recipe`. What a `Fit` runs and compares is in `trial`.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import permutations, product

import torch
from torch import Tensor

from ...formula import GATES, ROUNDINGS, NormSpec
from ...fused.recipe import Recipe
from .check import prove_layouts
from .plain_code import TORCH_FORWARDS
from .probe import OnDevice, autocast
from .refusals import NotInFamily, Unusable
from .trial import ALL_BF16, ALL_FP32, Dtypes, Trial, is_formula

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SAME_DTYPES = (ALL_BF16, Dtypes(FP16, FP16, FP16))
MIXED_DTYPES = (Dtypes(FP32, BF16, FP32), Dtypes(BF16, FP32, BF16))
MIXED_GATES = (Dtypes(FP32, FP32, BF16), Dtypes(BF16, BF16, FP32))
# None at all, and what `F.layer_norm` and `F.rms_norm` take where none is given.
DEFAULT_EPS = (0.0, 1e-5, torch.finfo(FP32).eps)


class Fit(Trial):
    """Finds the recipe of one probed module, or raises why there is none."""

    def recipe(self) -> Recipe:
        with OnDevice("cpu") as device:
            self.find_input()
        calls_norm = device.calls_norm and not self.gate_required
        try:
            return self._find_formula(calls_norm)
        except Unusable as error:
            # it normalises, so it is a norm, if one that fails on some inputs
            raise NotInFamily(str(error)) from error

    def _find_formula(self, calls_norm: bool) -> Recipe:
        if self.head_dim is not None and self.group != self.head_dim:
            raise NotInFamily(
                "it normalises over more than the last dimension, or a part of it"
            )
        recipe = self._first_that_agrees(calls_norm)
        if recipe.gate_optional:
            self._check_ungated(recipe)
        recipe = replace(
            recipe,
            hidden_size=self._fixed_size(recipe),
            asks_autocast=self._asks_autocast(recipe),
        )
        recipe = self._with_settings(recipe)
        recipe = prove_layouts(self, recipe)
        if self.head_dim is not None:
            recipe = replace(with_spec(recipe, group_size=None), hidden_size=None)
        return recipe

    # The formula

    def _first_that_agrees(self, calls_norm: bool) -> Recipe:
        """The first recipe with the module's results; limited to float32 where it has
        them in that alone.
        """
        near = self._near_in_float32(calls_norm)
        orders = _rounding_orders(near)
        elements = 4096
        if calls_norm:
            # What casts around torch's own norm may round as plain arithmetic does.
            orders += _rounding_orders(with_spec(near, functional=False))
            elements = 16_384  # few of which tell it from torch's own norm
        for recipe in orders:
            dtypes = [*SAME_DTYPES, *_mixed_dtypes(recipe)]
            if self._agrees_in_float32(recipe) and self._agrees_in(
                recipe, dtypes, elements
            ):
                return recipe
        recipe = orders[0]
        # x has to be float32 then, but its weight and gate need not
        dtypes = [dtypes for dtypes in _mixed_dtypes(recipe) if dtypes.x == FP32]
        if self._agrees_in_float32(recipe) and self._agrees_in(recipe, dtypes):
            return replace(recipe, only_float32=True)
        raise NotInFamily(
            f"it rounds to half precision in an order of its own; in float32 it is {recipe.spec}"
        )

    def _near_in_float32(self, calls_norm: bool) -> Recipe:
        """The first recipe whose results on a few rows are the module's but for
        roundings of float32.
        """
        self.draw_tensors(uneven=True)
        tensors = dict(self.tensors)
        x = self.rows(512)
        gate = None
        if self.gate is not None:
            gate = self.gates(x)
        y = self.run(x, gate)
        for recipe in self._candidates(calls_norm):
            plainest = _rounding_orders(recipe)[0]
            if not is_formula(y, plainest, x, tensors, gate):
                continue
            if self._is_eps(plainest):
                return recipe
        reason = "its formula is not one that this package knows"
        if self.gate is not None:
            reason = f"its second input, {self.gate!r}, is no gate that this package knows, or {reason}"
        raise NotInFamily(reason)

    def _candidates(self, calls_norm: bool) -> Iterator[Recipe]:
        """Every recipe, but for rounding, that a module with these tensors and numbers
        may have, the commonest first.
        """
        group_size = None
        if self.group != self.size:
            group_size = self.group
        for (weight, bias), (name, eps), outside, centered, offset, gate in product(
            self._operands(),
            self._eps_values(),
            (False, True),
            (False, True),
            (0.0, 1.0),
            (None,) if self.gate is None else GATES,
        ):
            with contextlib.suppress(ValueError):  # some exclude each other
                spec = NormSpec(
                    centered=centered,
                    eps=float(eps),
                    has_weight=weight is not None,
                    has_bias=bias is not None,
                    weight_offset=offset,
                    functional=calls_norm,
                    eps_outside=outside,
                    gate=gate,
                    group_size=group_size,
                )
                yield Recipe(
                    spec,
                    weight,
                    bias,
                    eps=name,
                    eps_value=eps,
                    gate=self.gate,
                    gate_optional=self.gate is not None and not self.gate_required,
                )

    def _operands(self) -> list[tuple[str | None, str | None]]:
        """Every (weight, bias) among the tensors that its forward reads."""
        rows = []
        for name, tensor in self.tensors.items():
            if name in self.attributes and len(tensor) == self.size:
                rows.append(name)
        return [*permutations((*rows, None), 2), (None, None)]

    def _eps_values(self) -> list[tuple[str | None, float]]:
        """Every eps, as (name of its attribute or None, value)."""
        values = []
        for name in self.attributes:
            value = getattr(self.module, name, None)
            if type(value) in (int, float) and 0.0 <= value < math.inf:
                values.append((name, value))
        fixed = [number for number in self.code.numbers if number < 1.0]
        for number in dict.fromkeys((*fixed, *DEFAULT_EPS)):
            values.append((None, number))
        return values

    def _is_eps(self, recipe: Recipe) -> bool:
        """Whether the attribute is its eps: with another value there it has another."""
        if recipe.eps is None:
            return True
        other = 2.0 * recipe.eps_value + 1e-3
        self.exact = False
        self.set(**{recipe.eps: other})
        is_eps = self._agrees_in(with_spec(recipe, eps=other), [ALL_FP32])
        self.set(**{recipe.eps: recipe.eps_value})
        return is_eps

    def _agrees_in_float32(self, recipe: Recipe) -> bool:
        """Whether it agrees there; settles whether to the last bit."""
        x = self.rows(4096)
        self.exact = True
        self.exact = self.agrees(recipe, x)
        return self.exact or self.agrees(recipe, x)

    def _agrees_in(
        self, recipe: Recipe, dtypes: Iterable[Dtypes], elements: int = 1024
    ) -> bool:
        x = self.rows(elements, half=True)
        with contextlib.suppress(Unusable):
            return self.agrees(recipe, x, dtypes)
        return False

    # What else decides about a call

    def _fixed_size(self, recipe: Recipe) -> int | None:
        """The only length of its rows; None if any is."""
        if self.group != self.size:
            # longer rows may have larger groups, or more of them
            return self.size
        if recipe.weight is None:
            try:
                self.run(self.normal(4, self.size + 8))
            except Unusable:
                return self.size
        return None

    def _check_ungated(self, recipe: Recipe) -> None:
        """Refuse a module that computes another formula without its gate."""
        ungated = replace(with_spec(recipe, gate=None), gate=None)
        dtypes = [*_dtypes(recipe), *_mixed_dtypes(ungated)]
        if recipe.only_float32:
            dtypes = [each for each in dtypes if each.x == FP32]
        if not self._agrees_in(ungated, dtypes):
            raise NotInFamily(
                f"without its second input, {self.gate!r}, it computes another formula"
            )

    def _asks_autocast(self, recipe: Recipe) -> bool:
        """Whether the module may compute something else while autocast is on.

        Autocast casts nothing in arithmetic of float32, and the kernels follow it where
        it casts for torch's own norms.
        """
        if type(self.module).forward in TORCH_FORWARDS:
            return False
        if self.code.asks_autocast or not recipe.spec.functional:
            return self.code.asks_autocast
        with autocast("cuda", BF16), OnDevice("cuda"):
            return not self._agrees_in(recipe, _dtypes(recipe))

    def _with_settings(self, recipe: Recipe) -> Recipe:
        """The recipe with what else the forward reads of the module: plain values,
        without which it may be another.
        """
        settings = ()
        held = self.code.module._parameters.items()
        absent = tuple(name for name, value in held if value is None)
        known = {recipe.weight, recipe.bias, recipe.eps, *absent}
        for name in self.attributes:
            if name in known or not hasattr(self.module, name):
                continue
            value = getattr(self.module, name)
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
        return replace(recipe, settings=settings, absent=absent)


def with_spec(recipe: Recipe, **changes) -> Recipe:
    return replace(recipe, spec=replace(recipe.spec, **changes))


def _rounding_orders(recipe: Recipe) -> list[Recipe]:
    """The recipe with every rounding order that its formula may have, the commonest
    first.
    """
    spec = recipe.spec
    # torch's own norms take no weight for each group
    is_behind = spec.functional and spec.group_size and spec.has_weight
    orders = []
    for rounding in ROUNDINGS:
        if is_behind and rounding == "once":
            continue
        with contextlib.suppress(ValueError):
            orders.append(with_spec(recipe, rounding=rounding))
    return orders


def _dtypes(recipe: Recipe) -> list[Dtypes]:
    """Those in which the module may be called, but for mixtures."""
    if recipe.only_float32:
        return [ALL_FP32]
    return [ALL_FP32, *SAME_DTYPES]


def _mixed_dtypes(recipe: Recipe) -> list[Dtypes]:
    """Mixtures that the module has to take."""
    mixed = []
    if recipe.weight is not None and not recipe.spec.functional:
        mixed += MIXED_DTYPES
    if recipe.gate is not None:
        mixed += MIXED_GATES
    return mixed
