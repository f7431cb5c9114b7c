"""Says of any module which norm formula it computes, or why none, by running it: no
name gets a module swapped.
"""

import inspect
import re
import types
from typing import NamedTuple

import torch

from ...fused.recipe import Recipe
from ...ops.backend import MAX_HIDDEN_SIZE
from .fit import Fit
from .inputs import NotANorm, NotInFamily, Trial
from .plain_code import TORCH_FORWARDS, NotPlain, attributes_read
from .probe import (
    DrawsRandom,
    Probe,
    Unusable,
    inputs,
    is_plain,
    neutral_modes,
    own_attributes,
    plain_attributes,
)

# A name only makes a module worth a line in the report when it is not swapped.
NORM_NAME = re.compile(r"(rms|layer|qk|head|add|gated)_?norm", re.IGNORECASE)
# Code that normalises calls one of these, directly or in a helper; a module without any
# tensor is run only if it does.
REDUCTIONS = {
    "mean",
    "sum",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "norm",
    "vector_norm",
    "normalize",
}
REDUCTIONS |= {"layer_norm", "rms_norm", "einsum", "matmul", "dot", "bmm"}


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


def recognise(
    module: torch.nn.Module, cache: dict[tuple, Verdict] | None = None
) -> Verdict:
    """Recognise one module, on any device, by its arithmetic; it is read, and neither
    run nor changed.

    Verdicts about modules with opaque attributes go to `cache`: they hold while the
    caller keeps those alive.
    """
    named = bool(NORM_NAME.search(class_name(module)))
    if (reason := _refusal(module)) is not None:
        return Verdict(None, *reason) if named and reason[0] else NOT_A_NORM
    key, lasting = _signature(module)
    known = _known if lasting or cache is None else cache
    if key not in known:
        try:
            known[key] = _examine(module, named)
        except Exception as error:
            # Whatever a user's class does, the other norms are still to be served. Not
            # kept: the cause may pass.
            reason = f"it could not be examined: {type(error).__name__}: {error}"
            return Verdict(None, reason, REWRITE) if named else NOT_A_NORM
    return known[key]


def class_name(module: torch.nn.Module) -> str:
    """The class's name; of a scripted module, that of the class it was made from."""
    return getattr(module, "original_name", type(module).__name__)


def _examine(module: torch.nn.Module, named: bool) -> Verdict:
    try:
        attributes = attributes_read(module)
    except NotPlain as error:
        return (
            Verdict(None, str(error), PLAINLY)
            if named or _normalises(module)
            else NOT_A_NORM
        )
    try:
        with neutral_modes():
            return Verdict(recipe=Fit(Probe(module), attributes).recipe())
    except (NotInFamily, NotANorm, Unusable) as error:
        if named or isinstance(error, NotInFamily):
            cure = (
                NOTHING
                if isinstance(error, NotANorm)
                else UNRUN
                if isinstance(error, Unusable)
                else REWRITE
            )
            return Verdict(None, str(error), cure)
        return NOT_A_NORM


def _normalises(module: torch.nn.Module) -> bool:
    """Whether a module whose code is not plain is a norm after all, by the rows that it
    gives.
    """
    try:
        with neutral_modes():
            Trial(Probe(module)).find_input()
    except DrawsRandom:  # it cannot be asked: its code must tell
        return _reduces(type(module).forward, type(module))
    except (NotANorm, Unusable):
        return False
    except NotInFamily:
        return True
    return True


def _refusal(module: torch.nn.Module) -> tuple[str, str] | None:
    """(reason, cure) if the module must not even be run; ("", "") if it is plainly
    something else.
    """
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted or traced", "patch the model before torch.jit"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return (
            "its weight is parametrized",
            "patch the model before the parametrization, or remove that first",
        )
    if next(module.children(), None) is not None:
        return _refusal_of_parent(module)
    if (
        getattr(cls.forward, "__module__", "").partition(".")[0] == "torch"
        and cls.forward not in TORCH_FORWARDS
    ):
        return (
            "its forward is one of torch's own that is no norm over the last dimension",
            NOTHING,
        )
    refusal = _refusal_of_tensors(module)
    if refusal is None and inputs(cls) is None:
        return (
            "its forward takes something other than one tensor, and perhaps a gate",
            UNRUN,
        )
    return refusal


def _refusal_of_parent(module: torch.nn.Module) -> tuple[str, str]:
    # A module with parameters and children is a norm fused with something; one with
    # children alone is a block.
    if not module._parameters and next(module.parameters(), None) is not None:
        return "", ""
    in_children = any(
        p is not None for child in module.children() for p in child.parameters()
    )
    return (
        "it has submodules",
        "nothing: a norm among them is listed by itself" if in_children else REWRITE,
    )


def _refusal_of_tensors(module: torch.nn.Module) -> tuple[str, str] | None:
    """Why the tensors that a module holds are not those of a norm."""
    cls = type(module)
    stores = (module._parameters, module._buffers, module.__dict__)
    tensors = [
        t for store in stores for t in store.values() if isinstance(t, torch.Tensor)
    ]
    for tensor in tensors:
        refusal = _refusal_of_tensor(tensor, cls)
        if refusal is not None:
            return refusal
    floats = [t for t in tensors if t.is_floating_point()]
    if len({tuple(t.shape) for t in floats}) > 1 and any(t.dim() == 2 for t in tensors):
        return "it holds tensors of several shapes", NOTHING
    if not floats and not _reduces(cls.forward, cls):
        return "its code calls no mean, sum or norm", NOTHING
    return None


def _refusal_of_tensor(tensor: torch.Tensor, cls: type) -> tuple[str, str] | None:
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        return "it has no shape yet", "run the model once, then patch it"
    if tensor.dim() > 2 or (tensor.dim() == 2 and not _reduces(cls.forward, cls)):
        shape = tuple(tensor.shape)
        return (
            f"it holds a tensor of shape {shape}; a norm's weight has one dimension, or two",
            NOTHING,
        )
    if tensor.numel() > MAX_HIDDEN_SIZE:
        return f"its hidden size {tensor.numel()} is above {MAX_HIDDEN_SIZE}", REWRITE
    return None


def _reduces(function, cls: type, depth: int = 4) -> bool:
    """Whether a function's code, or that of the methods and helpers it names, calls a
    reduction.
    """
    function = getattr(function, "_torchdynamo_orig_callable", inspect.unwrap(function))
    if depth == 0 or not isinstance(function, types.FunctionType):
        return False
    names = set(function.__code__.co_names)
    if names & REDUCTIONS:
        return True
    helpers = [
        getattr(cls, name, None) or function.__globals__.get(name) for name in names
    ]
    helpers += [cell.cell_contents for cell in function.__closure__ or ()]
    return any(_reduces(helper, cls, depth - 1) for helper in helpers)


def _signature(module: torch.nn.Module) -> tuple[tuple, bool]:
    """(all that the verdict may depend on, whether it means the same once the module is
    gone).
    """
    cls = type(module)
    tensors = tuple(
        (
            name,
            None
            if t is None
            else (tuple(getattr(t, "ds_shape", t.shape)), t.is_floating_point()),
        )
        for name, t in module._parameters.items()
    )
    plain = tuple(
        sorted(
            (name, type(v).__name__, v)
            for name, v in plain_attributes(module).items()
            if v == v
        )
    )
    opaque = [t for t in module._buffers.values() if t is not None]
    opaque += [
        value for value in own_attributes(module).values() if not is_plain(value)
    ]
    return (cls, cls.forward, tensors, plain, tuple(map(id, opaque))), not opaque
