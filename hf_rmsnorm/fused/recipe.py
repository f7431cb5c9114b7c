"""Two descriptions of one norm module.

A `Recipe` holds the proven formula, and the names under which the module keeps the
operands. `Asked` holds a patch's options for it.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..formula import NormSpec
from ..operands import present
from ..ops.backend import autocasts_functional
from ..ops.limits import shapes_fit


@dataclass(frozen=True)
class Recipe:
    """How to compute one norm module: the formula, and the names under which the module
    keeps the operands.

    Args:
        spec: the formula, with the eps found when the module was recognised.
        weight, bias: names of the module's attributes, None where the formula has none.
        eps: name of the attribute that holds eps; None if eps is fixed in the code.
        eps_value: what that attribute held when ``spec.eps`` was found; any other value
            is read as eps itself.
        hidden_size: the only size of x's last dimension that a norm without weight
            accepts; None if any.
        settings: plain attributes that its forward reads, as (name, value); with others
            it computes another norm.
        absent: parameters that the module has a place for and does not hold; with one
            of them it computes another norm.
        gate: name of the forward's argument that is the gate.
        gate_optional: without a gate, the module computes the same formula ungated.
        only_float32: in half precision the module rounds in an order that no `NormSpec`
            has, as where it does not cast to float32.
        asks_autocast: while autocast is on it may compute something else, as
            `NemotronLayerNorm1P` does.
        row_major: the output is contiguous whatever the strides of the input.

    Calls that do not meet all this run the module's own forward.
    """

    spec: NormSpec
    weight: str | None = None
    bias: str | None = None
    eps: str | None = None
    eps_value: Any = None
    hidden_size: int | None = None
    settings: tuple = ()
    absent: tuple[str, ...] = ()
    gate: str | None = None
    gate_optional: bool = False
    only_float32: bool = False
    asks_autocast: bool = False
    row_major: bool = False

    def spec_of(self, module: Module) -> NormSpec | None:
        """The formula with the eps that module holds now; None if that is no eps, or a
        setting has changed.
        """
        if (self.settings or self.absent) and self.changes(module):
            return None
        if self.eps is None:
            return self.spec
        eps = getattr(module, self.eps)
        if eps == self.eps_value:
            return self.spec
        if isinstance(eps, (float, int)) and 0.0 <= eps < math.inf:
            return self.spec.with_eps(float(eps))
        return None

    def changes(self, module: Module) -> list[str]:
        """What about the module is no longer as it was when it was recognised, in
        words; its eps may be another.
        """
        changed = []
        for name, value in self.settings:  # asked by every call
            now = getattr(module, name, "gone")
            if now is value:
                continue
            if type(now) is not type(value) or now != value:
                changed.append(f"{name} is now {now}")
        for name in self.absent:
            if module._parameters.get(name) is not None:
                changed.append(f"it has a {name} now")
        return changed

    @property
    def is_of_rows(self) -> bool:
        """Whether this is a norm of whole rows of one input."""
        return self.gate is None and self.spec.group_size is None

    def fits(self, x: Tensor, weight, bias, gate=None) -> bool:
        """Whether the module computes the formula for these tensors."""
        fits = shapes_fit(x, weight, bias, gate)
        return fits and self.suits(x, weight, bias)

    def suits(self, x: Tensor, weight, bias) -> bool:
        """Whether the module computes the formula of tensors of these dtypes, in rows
        of this size.
        """
        if self.only_float32 and x.dtype != torch.float32:
            return False
        if self.hidden_size is not None and x.shape[-1:] != (self.hidden_size,):
            return False
        dtypes = {parameter.dtype for parameter in present(weight, bias)}
        if len(dtypes) > 1:
            return False
        # Some mixtures torch's own operators refuse: left to torch, unless autocast
        # resolves them.
        if not self.spec.functional or dtypes <= {x.dtype}:
            return True
        return autocasts_functional(self.spec, x.device.type)


def parameters_of(module: Module, recipe: Recipe) -> tuple | None:
    """(weight, bias) of a module as it stands; None where it lacks one."""
    # nn.Module's own attribute look-up takes as long as a kernel launch's bookkeeping;
    # most weights are parameters.
    held = module._parameters
    weight = held.get(recipe.weight)
    bias = held.get(recipe.bias)
    if weight is None and recipe.weight is not None:
        weight = getattr(module, recipe.weight)
        if weight is None:
            return None
    if bias is None and recipe.bias is not None:
        bias = getattr(module, recipe.bias)
        if bias is None:
            return None
    return weight, bias


@dataclass(frozen=True)
class Asked:
    """A patch's options for one norm.

    Args:
        as_rms: to compute RMSNorm, as a converted checkpoint says, where the module's
            own forward is a LayerNorm.
        fuse_residual: one launch may compute the norm with what surrounds it: a sum, a
            rotation, a modulation.
        memory_efficient: the kernels' backward is to read the norm's output instead of
            its input.
        input_needed: why it reads the input all the same; "" where it need not.
    """

    as_rms: bool = False
    fuse_residual: bool = True
    memory_efficient: bool = False
    input_needed: str = ""

    def of(self, proven: Recipe) -> Recipe:
        """The recipe to compute instead of the proven one."""
        if self.as_rms:
            return replace(proven, spec=replace(proven.spec, centered=False))
        return proven

    @property
    def keeps_output(self) -> bool:
        """Whether the backward reads the norm's output."""
        return self.memory_efficient and not self.input_needed


NOTHING = Asked()
