"""Says of any module which norm formula it computes, or why none, by running it: no
name gets a module swapped.
"""

import re
import types
from typing import NamedTuple

import torch

from ...fused.recipe import Recipe
from ...ops.backend import MAX_HIDDEN_SIZE
from .fit import Fit
from .inputs import NotANorm, NotInFamily
from .plain_code import TORCH_FORWARDS, NotPlain, attributes_read
from .probe import (
    Probe,
    Unusable,
    inputs,
    neutral_modes,
    own_attributes,
    own_tensors,
    plain_attributes,
)

# A name only makes a module worth a line in the report when it is not swapped.
NORM_NAME = re.compile(r"(rms|layer|qk|head|add|gated)_?norm", re.IGNORECASE)
# Code that normalises calls one of these, directly or in a helper.
ROOTS = {"rsqrt", "std", "std_mean", "norm", "vector_norm", "normalize"}
ROOTS |= {"layer_norm", "rms_norm"}


class Verdict(NamedTuple):
    """The result for one module: a recipe; or the reason why it has none; or neither,
    if it is not a norm at all.
    """

    recipe: Recipe | None = None
    reason: str | None = None
    cure: str = ""  # how a user may remove the reason


NOT_A_NORM = Verdict()
NOTHING = "nothing: it is no norm over the last dimension, and runs its own forward"
UNRUN = "nothing, if it is no norm or runs kernels of its own; otherwise let its forward run on one CPU tensor"
REWRITE = "nothing breaks, it runs its own forward; to have it fused, compute one of the formulas in docs/supported.md"
PLAINLY = "nothing breaks, it runs its own forward; to have it fused, write it in plain arithmetic: docs/supported.md"
_known: dict[tuple, Verdict] = {}


def recognise(module: torch.nn.Module) -> Verdict:
    """Recognise one module, on any device, by its arithmetic; it is read, and neither
    run nor changed.
    """
    verdict = _refusal(module)
    is_named = bool(NORM_NAME.search(class_name(module)))
    if verdict is not None:
        return verdict if is_named else NOT_A_NORM
    key = _signature(module)
    if key not in _known:
        _known[key] = _examine(module, is_named)
    return _known[key]


def class_name(module: torch.nn.Module) -> str:
    """The class's name; of a scripted module, that of the class it was made from."""
    return getattr(module, "original_name", type(module).__name__)


def _examine(module: torch.nn.Module, is_named: bool) -> Verdict:
    is_norm = is_named
    try:
        attributes = attributes_read(module)
        with neutral_modes():
            return Verdict(Fit(Probe(module), attributes).recipe())
    except NotPlain as error:
        is_norm = is_named or _takes_root(type(module))
        verdict = Verdict(None, str(error), PLAINLY)
    except NotInFamily as error:
        is_norm = True
        verdict = Verdict(None, str(error), REWRITE)
    except NotANorm as error:
        verdict = Verdict(None, str(error), NOTHING)
    except Unusable as error:
        verdict = Verdict(None, str(error), UNRUN)
    except Exception as error:
        # Whatever a user's class does, the other norms are still to be served.
        reason = f"it could not be examined: {type(error).__name__}: {error}"
        verdict = Verdict(None, reason, REWRITE)
    return verdict if is_norm else NOT_A_NORM


def _refusal(module: torch.nn.Module) -> Verdict | None:
    """The verdict on a module that must not even be run."""
    if isinstance(module, torch.jit.ScriptModule):
        cure = "patch the model before torch.jit"
        return Verdict(None, "it is scripted or traced", cure)
    if torch.nn.utils.parametrize.is_parametrized(module):
        cure = "patch the model before the parametrization, or remove that first"
        return Verdict(None, "its weight is parametrized", cure)
    if next(module.children(), None) is not None:
        return _refusal_of_parent(module)
    forward = type(module).forward
    is_of_torch = getattr(forward, "__module__", "").partition(".")[0] == "torch"
    if is_of_torch and forward not in TORCH_FORWARDS:
        reason = (
            "its forward is one of torch's own that is no norm over the last dimension"
        )
        return Verdict(None, reason, NOTHING)
    if inputs(type(module)) is None:
        reason = "its forward takes something other than one tensor, and perhaps a gate"
        return Verdict(None, reason, UNRUN)
    for _, tensor in own_tensors(module):
        if tensor.numel() > MAX_HIDDEN_SIZE:
            reason = f"its hidden size {tensor.numel()} is above {MAX_HIDDEN_SIZE}"
            return Verdict(None, reason, REWRITE)
    return None


def _refusal_of_parent(module: torch.nn.Module) -> Verdict:
    # A module with parameters and children is a norm fused with something; one with
    # children alone is a block.
    in_children = any(list(child.parameters()) for child in module.children())
    if in_children and not module._parameters:
        return NOT_A_NORM
    cure = "nothing: a norm among them is listed by itself" if in_children else REWRITE
    return Verdict(None, "it has submodules", cure)


def _takes_root(cls: type) -> bool:
    """Whether a forward of the class, or of one it inherits from, calls one of ROOTS."""
    return any(_calls_root(vars(c).get("forward"), cls) for c in cls.__mro__)


def _calls_root(function, cls: type, depth: int = 4) -> bool:
    """Whether a function's code, or that of the methods and helpers it names, does."""
    if depth == 0 or not isinstance(function, types.FunctionType):
        return False
    names = set(function.__code__.co_names)
    if names & ROOTS:
        return True
    helpers = [getattr(cls, name, function.__globals__.get(name)) for name in names]
    return any(_calls_root(helper, cls, depth - 1) for helper in helpers)


def _signature(module: torch.nn.Module) -> tuple:
    """All that the verdict may depend on."""
    cls = type(module)
    parts = [cls, cls.forward, *module._parameters, *own_attributes(module)]
    for name, tensor in own_tensors(module):
        parts += [name, getattr(tensor, "ds_shape", tensor.shape)]
    for name, value in plain_attributes(module).items():
        parts += [name, type(value), value]
    return tuple(parts)
