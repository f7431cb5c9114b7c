"""The checks of a recompiled forward at each call: whether it still serves, and the
operands of its norms.

A call of a fused layer comes here first, to the forward that `guarded` made. That runs the
rewritten one, which calls functions of `sums`, `modulated` and `attention`. Each of these
asks `operands_ahead`.
"""

import functools
import inspect
from collections.abc import Callable

from torch.compiler import is_compiling
from torch.nn import Module

from ..ops.backend import left_alone
from .hooks import why_called

_CALL = Module.__call__
GUARD = "stepping_aside"  # the name of the functions that `guarded` makes


def operands_ahead(norm) -> tuple | None:
    """(its `NormPatch`, launches, weight, bias) of a patched norm that may be computed
    before it is called.

    None if the module is not patched, or has to be called. It has to be called in
    compiled code, if fusion is off, or if its class defines `__call__`. So too for the
    reasons of `why_called`, or if it is no norm of one input.
    """
    if is_compiling():
        return None
    cls = type(norm)
    patch = getattr(cls, "_hf_rmsnorm_patch", None)
    if patch is None or cls.__call__ is not _CALL:
        return None
    if not patch.may_fuse or why_called(norm):
        return None
    held = patch.held_by(norm)
    if held is None:
        return None
    launches, weight, bias = held
    return patch, launches, weight, bias


def guarded(forward: Callable, base: type, owner: list[type]) -> Callable:
    """A forward that runs the class's own one under `torch.compile`, if it was
    exchanged, or if no kernel serves x.

    Args:
        owner: will hold the subclass of base that gets this forward.
    """
    is_exchanged = _exchange_check(base)

    @functools.wraps(forward)
    def stepping_aside(self, *args, **kwargs):
        if is_compiling():
            # Dynamo does not trace `base.forward` of a class that is allowed in graphs,
            # as many of diffusers' are.
            return super(owner[0], self).forward(*args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()), None)
        is_unserved = getattr(x, "is_cpu", False) and left_alone(x)
        runs = base.forward if is_exchanged() or is_unserved else forward
        return runs(self, *args, **kwargs)

    return stepping_aside


def _exchange_check(base: type) -> Callable[[], bool]:
    """Returns a function that asks whether a class has another forward than now, or that
    forward other code, as autoreload gives it.
    """
    original = base.forward
    inner = inspect.unwrap(original)
    code = inner.__code__
    return lambda: base.forward is not original or inner.__code__ is not code
