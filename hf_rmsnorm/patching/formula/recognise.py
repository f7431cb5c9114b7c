"""Says of any module which norm formula it computes, or why none, by running a copy: no
name gets a module swapped.

`plan.list_norms` calls `recognise`. A module that is not known yet is read (`plain_code`)
and then run on chosen rows: `fit.Fit` is a `trial.Trial`, which is a `probe.Probe`.
"""

import re
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from ...fused.recipe import Recipe
from ...kernels.sizes import MAX_HIDDEN_SIZE
from .fit import Fit
from .plain_code import MODULE_STATE, Code, look_up, own_values
from .probe import neutral_modes, true_shape
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
# verdicts on modules with equal signatures, each with all that was read for it
_known: dict[tuple, tuple[Verdict, list[tuple]]] = {}


def recognise(module: Module) -> Verdict:
    """Recognise one module, on any device, by its arithmetic. It is read, and a
    copy of it is run; it is not changed itself.
    """
    # as one of torch's, or derived from it
    is_named = isinstance(module, (torch.nn.LayerNorm, torch.nn.RMSNorm))
    is_named = is_named or bool(NORM_NAME.search(class_name(module)))
    values = own_values(module)
    refusal = _why_not_examined(module, values)
    if refusal is not None:
        is_norm = is_named and refusal.reason
        return Verdict(None, refusal) if is_norm else NOT_A_NORM
    key = _signature(module, values)
    verdict, reads = _known.get(key, (None, ()))
    if verdict is not None and all(look_up(p, name) is v for p, name, v in reads):
        return verdict
    code = Code(module)
    try:
        with neutral_modes():
            verdict = Verdict(Fit(module, code).recipe())
    except Refused as error:
        is_norm = is_named or _normalises(module, error)
        refusal = Refusal(str(error), error.cure)
        verdict = Verdict(None, refusal) if is_norm else NOT_A_NORM
    except Exception as error:
        # Whatever a user's class does, the other norms are still to be served; another
        # try may give something else.
        reason = f"it could not be examined: {type(error).__name__}: {error}"
        refusal = Refusal(reason, NotInFamily.cure)
        return Verdict(None, refusal) if is_named else NOT_A_NORM
    _known[key] = verdict, code.reads
    return verdict


def class_name(module: Module) -> str:
    """The class's name; of a scripted module, that of the class it was made from."""
    return getattr(module, "original_name", type(module).__name__)


def _normalises(module: Module, error: Refused) -> bool:
    """Whether a module that was refused for this is a norm, whatever its name."""
    if not isinstance(error, NotPlain):
        return isinstance(error, NotInFamily)
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and not ROOTS.isdisjoint(code.co_names)


def _why_not_examined(module: Module, values: dict[str, object]) -> Refusal | None:
    """Why a module must not even be run; without a reason if it is a block, which is no
    norm. None if it may be run.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return Refusal("it is scripted or traced", "patch the model before torch.jit")
    if torch.nn.utils.parametrize.is_parametrized(module):
        cure = "patch the model before the parametrization, or remove that first"
        return Refusal("its weight is parametrized", cure)
    if list(module.children()):
        # With parameters it is a norm fused with something, else a block.
        is_block = not module._parameters and list(module.parameters())
        return Refusal("" if is_block else "it has submodules", NotInFamily.cure)
    for value in values.values():
        if is_lazy(value):
            reason = "its parameters are made by its first call"
            return Refusal(reason, "run the model once, then patch it")
        if isinstance(value, Tensor) and value.numel() > MAX_HIDDEN_SIZE:
            reason = f"its hidden size {value.numel()} is above {MAX_HIDDEN_SIZE}"
            return Refusal(reason, NotInFamily.cure)
    return None


def _signature(module: Module, values: dict[str, object]) -> tuple:
    """All that the verdict may depend on, besides the class's code."""
    cls = type(module)
    code = getattr(cls.forward, "__code__", None)
    parts = [*cls.__mro__, cls.forward, code, *module._parameters]
    # as methods on the instance
    parts += sorted(set(vars(module)) - MODULE_STATE - set(values))
    for name, value in values.items():
        is_tensor = isinstance(value, Tensor)
        parts += [name, true_shape(value) if is_tensor else repr(value)]
    return tuple(parts)
