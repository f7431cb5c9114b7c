"""Says of any module which norm formula it computes, or why none, by running it: no
name gets a module swapped.
"""

import re
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ...fused.recipe import Recipe
from ...fused.source import CannotRewrite
from ...kernels.sizes import MAX_HIDDEN_SIZE
from .fit import Fit
from .probe import neutral_modes, own_values, true_shape
from .refusals import NotInFamily, NotPlain, Refusal, Refused

# A name only makes a module worth a line in the report when it is not swapped.
NORM_NAME = re.compile(r"(rms|layer|qk|head|add|gated)_?norm", re.IGNORECASE)
# So does a forward that calls one of these.
ROOTS = {"rsqrt", "norm", "vector_norm", "normalize", "layer_norm", "rms_norm"}


class Verdict(NamedTuple):
    """The result for one module: a recipe; or why it has none; or neither,
    if it is not a norm at all.
    """

    recipe: Recipe | None = None
    refusal: Refusal | None = None


NOT_A_NORM = Verdict()
_known: dict[tuple, Verdict] = {}


def recognise(module: Module) -> Verdict:
    """Recognise one module, on any device, by its arithmetic; it is read, and neither
    run nor changed.
    """
    is_named = _is_named(module)
    values = own_values(module)
    verdict = _refusal(module, values)
    if verdict is not None:
        return verdict if is_named else NOT_A_NORM
    key = _signature(module, values)
    if key in _known:
        return _known[key]
    verdict, is_proven = _examine(module, is_named)
    if is_proven:
        _known[key] = verdict
    return verdict


def _is_named(module: Module) -> bool:
    """Whether its class is called a norm, or is derived from one of torch's."""
    of_torch = torch.nn.LayerNorm, torch.nn.RMSNorm
    return isinstance(module, of_torch) or bool(NORM_NAME.search(class_name(module)))


def class_name(module: Module) -> str:
    """The class's name; of a scripted module, that of the class it was made from."""
    return getattr(module, "original_name", type(module).__name__)


def _examine(module: Module, is_named: bool) -> tuple[Verdict, bool]:
    """(the verdict, whether another try would give the same). An exception may have a
    reason that passes.
    """
    try:
        with neutral_modes():
            return Verdict(Fit(module).recipe()), True
    except Refused as error:
        verdict = Verdict(None, Refusal(str(error), error.cure))
        is_proven = _is_own(error)
        is_norm = is_named or isinstance(error, NotInFamily)
        if isinstance(error, NotPlain):
            is_norm = is_norm or _takes_root(module)
    except Exception as error:
        # Whatever a user's class does, the other norms are still to be served.
        is_proven = False
        is_norm = is_named
        reason = f"it could not be examined: {type(error).__name__}: {error}"
        verdict = Verdict(None, Refusal(reason, NotInFamily.cure))
    return verdict if is_norm else NOT_A_NORM, is_proven


def _is_own(error: BaseException) -> bool:
    """Whether a refusal is this package's own, and not due to another exception."""
    while error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, (Refused, CannotRewrite))


def _takes_root(module: Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and not ROOTS.isdisjoint(code.co_names)


def _refusal(module: Module, values: dict[str, object]) -> Verdict | None:
    """The verdict on a module that must not even be run."""
    if isinstance(module, torch.jit.ScriptModule):
        cure = "patch the model before torch.jit"
        return Verdict(None, Refusal("it is scripted or traced", cure))
    if torch.nn.utils.parametrize.is_parametrized(module):
        cure = "patch the model before the parametrization, or remove that first"
        return Verdict(None, Refusal("its weight is parametrized", cure))
    if next(module.children(), None) is not None:
        return _refusal_of_parent(module)
    for value in values.values():
        if isinstance(value, Tensor) and value.numel() > MAX_HIDDEN_SIZE:
            reason = f"its hidden size {value.numel()} is above {MAX_HIDDEN_SIZE}"
            return Verdict(None, Refusal(reason, NotInFamily.cure))
    return None


def _refusal_of_parent(module: Module) -> Verdict:
    # A module with parameters and children is a norm fused with something; one with
    # children alone is a block.
    if not module._parameters:
        for child in module.children():
            if list(child.parameters()):
                return NOT_A_NORM
    return Verdict(None, Refusal("it has submodules", NotInFamily.cure))


def _signature(module: Module, values: dict[str, object]) -> tuple:
    """All that the verdict may depend on."""
    cls = type(module)
    parts = [cls, cls.forward, *module._parameters]
    for name, value in values.items():
        if isinstance(value, Tensor):
            parts += [name, true_shape(value)]
        else:
            parts += [name, repr(value)]
    return tuple(parts)
