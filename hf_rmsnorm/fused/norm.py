"""The forward that a patched norm runs.

A call of a patched norm comes here first, to the forward of `forward_of`. Next it goes to
`ops.norm.run_norm`, and then perhaps to `NormPatch.run_unfused`. A fused layer does not
call its norm: `sums`, `modulated` and `attention` read it by `NormPatch.held_by`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Module

from ..formula import NormSpec, OptionalTensor
from ..operands import of_norm
from ..ops.backend import autocast_anywhere, compiles_original, left_alone
from ..ops.launches import Launches
from ..ops.norm import run_by_operator_or_formula, run_norm, run_reference
from ..reference import in_groups
from .recipe import Asked, Recipe, parameters_of
from .watch import NORM, note, watchers

# The current state of a module: its launches, weight and bias.
Held = tuple[Launches, OptionalTensor, OptionalTensor]


def forward_of(patch: NormPatch) -> Callable:
    """The forward of a class that this patch is for."""

    def forward(self, *args, **kwargs):
        is_compiled = is_compiling()
        if is_compiled and compiles_original():
            return patch.compute_unfused(self, args, kwargs)
        call = read(patch, self, args, kwargs)
        if call is None:
            return patch.run_unfused(self, args, kwargs)
        launches, operands = call
        y = None
        if not is_compiled:
            replaced = NormPatch.compute_unfused, patch, self, args, kwargs
            y = run_norm(launches, operands, replaced)
        if y is None:
            y = run_by_operator_or_formula(launches.spec, operands, launches.suits)
        if y is None:
            return patch.run_unfused(self, args, kwargs)
        if watchers:
            note(NORM, (self,), operands[0], True)
        if patch.is_plain:
            return y
        return patch.returned(y)

    forward.__doc__ = patch.forward.__doc__
    forward.__signature__ = patch.signature
    return forward


def read(
    patch: NormPatch, module: Module, args: tuple[Any, ...], kwargs: dict
) -> tuple | None:
    """The arguments of `run_norm` for a call, (launches, operands); None if `compute_unfused`
    has to serve it.

    The formula of the launches has the eps that the module holds now. Of a norm in
    groups, each group is a row.
    """
    gate = None
    if len(args) == 1 and not kwargs:
        x = args[0]
    else:
        x, gate = _inputs(patch, args, kwargs)
    if not isinstance(x, Tensor):
        return None
    if x.is_cpu and left_alone(x) and not patch.replaces:
        return None
    held = patch.held_by(module)
    if held is None:
        return None
    if not patch.is_plain:
        return call_of(patch, held, x, gate)
    launches, weight, bias = held
    return launches, of_norm(x, weight, bias)


def call_of(patch: NormPatch, held: Held, x: Tensor, gate) -> tuple | None:
    """`read` of an input and a gate, for a module that holds this."""
    launches, weight, bias = held
    recipe = patch.recipe
    spec = launches.spec
    if gate is not None and not isinstance(gate, Tensor):
        return None
    if recipe.gate is not None and gate is None:
        if not recipe.gate_optional:
            return None
        spec = replace(spec, gate=None)
    if patch.group_size is not None:
        if not recipe.fits(x, weight, bias, gate):
            return None
        x, weight, bias, gate = in_groups(patch.group_size, x, weight, bias, gate)
    return patch.launches_for(spec), of_norm(x, weight, bias, gate)


def _inputs(patch: NormPatch, args: tuple[Any, ...], kwargs: dict) -> tuple:
    """(input, gate) of a call, or (None, None) if it holds anything else."""
    by_name = dict(zip(patch.names, args, strict=False))
    by_name.update(kwargs)
    is_whole = len(by_name) == len(args) + len(kwargs)
    if not is_whole or not by_name.keys() <= set(patch.names):
        return None, None
    x = by_name.get(patch.names[0])
    gate = by_name.get(patch.recipe.gate)
    return x, gate


class NormPatch:
    """The class and recipe of a patched norm, as its forward reads them.

    Attributes:
        proven: of the module's own forward.
        recipe: the proven one, changed by the patch's options.
    """

    def __init__(
        self, base: type, forward: Callable, code, proven: Recipe, asked: Asked
    ):
        recipe = asked.of(proven)
        self.base = base
        self.proven = proven
        self.asked = asked
        self.recipe = recipe
        self.forward = forward
        self.code = code
        self.signature = inspect.signature(forward)
        self.names = list(self.signature.parameters)[1:2]
        if recipe.gate is not None:
            self.names.append(recipe.gate)
        self.paths = weakref.WeakKeyDictionary()  # of the modules, for errors
        self.group_size = recipe.spec.group_size
        self.launches = _launches(self, recipe.spec)
        # whether its own forward computes something else
        self.replaces = asked.as_rms
        # whether that serves calls under autocast
        self.asks_autocast = recipe.asks_autocast and not self.replaces
        # whether more than a module's eps may change its formula
        self.may_change = bool(recipe.settings or recipe.absent or self.asks_autocast)
        # takes x alone, of any dtype; reads it as it is, returns y as it is
        is_restricted = recipe.row_major or recipe.only_float32
        self.is_plain = recipe.is_of_rows and not is_restricted
        # whether it may be computed with what surrounds it, as `operands_ahead` says
        self.may_fuse = asked.fuse_residual and recipe.is_of_rows

    def launches_for(self, spec: NormSpec) -> Launches:
        """The launches of a formula: the recipe's own, or as a module computes it with
        another eps, or without its gate.
        """
        if spec is self.recipe.spec or spec is self.launches.spec:
            return self.launches
        return _launches_of_another_formula(self, spec)

    def paths_of(self, weight: int) -> list[str]:
        """The path of the module whose weight has this id; those of all modules if none
        has it. Copies of a module have none.
        """
        paths = dict(self.paths)
        for module, path in paths.items():
            held = module._parameters.get(self.recipe.weight)
            if held is not None and id(held) == weight:
                return [path]
        return list(paths.values())

    def is_ours(self, module: Module) -> bool:
        """Whether the module is still patched, and its class and that class's code as
        they were then.

        Its forward may be kept while it is unpatched. Its class may get another
        forward, and that forward other code, as IPython's autoreload does.
        """
        return (
            getattr(type(module), "_hf_rmsnorm_patch", None) is self
            and self.base.forward is self.forward
            and getattr(self.forward, "__code__", None) is self.code
        )

    def held_by(self, module: Module) -> Held | None:
        """(launches, weight, bias) of a module as it stands.

        None if it is no longer patched, if a parameter is missing, or if its eps is
        invalid. So too if a setting has changed since it was recognised, or if it asks
        for autocast and that is on.
        """
        if not self.is_ours(module):
            return None
        recipe = self.recipe
        parameters = parameters_of(module, recipe)
        if parameters is None:
            return None
        launches = self.launches
        # where eps is fixed in the code, its name and its value are None; an equal number
        # of another identity takes the longer way, to the same formula
        if self.may_change or module.__dict__.get(recipe.eps) is not recipe.eps_value:
            if self.asks_autocast and autocast_anywhere():
                return None
            spec = recipe.spec_of(module)
            if spec is None:
                return None
            launches = self.launches_for(spec)
        weight, bias = parameters
        return launches, weight, bias

    def returned(self, y: Tensor) -> Tensor:
        """Rows that were computed, as the module returns them."""
        if self.group_size is not None:
            y = y.flatten(-2)
        if self.recipe.row_major:
            return y.contiguous()
        return y

    def run_unfused(self, module: Module, args: tuple[Any, ...], kwargs: dict):
        """`compute_unfused`, which `count_launches` hears of."""
        if watchers:
            inputs = [*args, *kwargs.values(), None]
            note(NORM, (module,), inputs[0], False)
        return self.compute_unfused(module, args, kwargs)

    def compute_unfused(self, module: Module, args: tuple[Any, ...], kwargs: dict):
        """The result of the module's own forward. Where that computes something else,
        it is the formula in plain torch.

        Raises:
            TypeError: the forward is replaced, and the formula does not cover the call.
        """
        if self.replaces and self.is_ours(module):
            return _by_reference(self, module, args, kwargs)
        return self.base.forward(module, *args, **kwargs)

    def unfused(self, module: Module, x: Tensor) -> Tensor:
        """`compute_unfused` of x alone."""
        return self.compute_unfused(module, (x,), {})


def _launches(patch: NormPatch, spec: NormSpec) -> Launches:
    suits = patch.recipe.suits
    if spec.group_size is not None:
        spec = spec.ungrouped
    if patch.group_size is not None:
        suits = None  # `call_of` has asked it of whole rows
    return Launches(
        spec,
        suits,
        keeps_output=patch.asked.keeps_output,
        paths_of=patch.paths_of,
    )


_launches_of_another_formula = lru_cache(1_024)(_launches)


def _by_reference(
    patch: NormPatch, module: Module, args: tuple[Any, ...], kwargs: dict
):
    call = read(patch, module, args, kwargs)
    if call is None:
        raise TypeError(
            f"{type(module).__name__} runs the RMSNorm that its converted checkpoint "
            "records, on the input alone and with the eps that it had: unpatch it to "
            "call it in another way"
        )
    launches, operands = call
    return patch.returned(run_reference(launches.spec, operands))


def patch_of(module: Module) -> NormPatch | None:
    """The `NormPatch` of a patched norm; None for another module."""
    return getattr(type(module), "_hf_rmsnorm_patch", None)


def recipe_of(module: Module) -> Recipe | None:
    """The recipe that a patched norm computes; None for another module."""
    patch = patch_of(module)
    if patch is None:
        return None
    return patch.recipe


def norm_asked_to_fuse(module: Module) -> NormPatch | None:
    """`patch_of` a norm that a user lets be fused with what surrounds it; None of any
    other module. `NormPatch.may_fuse` leaves out those in groups, or with a gate.
    """
    patch = patch_of(module)
    if patch is None or not patch.asked.fuse_residual:
        return None
    return patch
