"""The class of a module whose forward was compiled again, and the operands of the norms
in that forward.
"""

from collections.abc import Callable
from functools import cache

from torch.compiler import is_compiling
from torch.nn import Module

from ..ops.backend import autocast_anywhere
from .hooks import why_called
from .source import CannotRewrite, wrappers
from .subclass import derive, marked

_CALL = Module.__call__


def operands_ahead(norm, of_any_input: bool = False) -> tuple | None:
    """(its `NormPatch`, launches, weight, bias) of a patched norm that may be computed
    before it is called.

    None if the module is not patched, or has to be called. It has to be called in
    compiled code, if fusion is off, if its class defines `__call__`, for what
    `why_called` names, or if it is no norm of one input. Unless
    `of_any_input`, it has to be called too if its recipe restricts its input: then the
    caller asks whether it serves this one.
    """
    if is_compiling():
        return None
    cls = type(norm)
    patched = getattr(cls, "_hf_rmsnorm_patch", None)
    if patched is None or cls.__call__ is not _CALL:
        return None
    joins = patched.joins_of_any_input if of_any_input else patched.joins
    if not joins or why_called(norm):
        return None
    if patched.recipe.asks_autocast and autocast_anywhere():
        return None
    held = patched.held_by(norm)
    if held is None:
        return None
    launches, weight, bias = held
    return patched, launches, weight, bias


def fused_layer_class(base: type, fusion) -> type:
    """A subclass of base, with base's name and module, whose forward is base's own but
    for a fusion.

    Args:
        fusion: hashable; its ``forward_for(base, owner)`` makes the forward, as
            `source.guarded` does.

    Raises:
        CannotRewrite: the forward cannot be compiled again, or is wrapped by what its
            source does not show.
        TypeError: base cannot be subclassed.
    """
    return _made(base, base.forward, fusion)


@cache
def _made(base: type, own: Callable, fusion) -> type:
    marks = {"_hf_rmsnorm_layer_base": base, "_hf_rmsnorm_fusion": fusion}
    owner: list[type] = []
    forward = fusion.forward_for(base, owner)
    cls = derive(base, forward, marks, fused_layer_class, fusion)
    owner.append(cls)
    if wrappers(cls.forward) != wrappers(own):
        raise CannotRewrite(
            "something has wrapped its forward that its source does not show"
        )
    return cls


def layer_part(cls: type) -> type | None:
    """The class in cls's ancestry that `fused_layer_class` made, or None."""
    return marked(cls, "_hf_rmsnorm_fusion")
