"""The fused part of a patched attention: the rotary embedding of q and k in one launch,
with their norms if they have any.

A forward calls these functions once it was compiled again from its own source, by
`patching.layers.qk` or `rotary_rewrite`. They ask `rotary` how the function rotates, and
call `ops.qk`. The norms wait for the rotation: only transposes
stand between, and those do not move the last dimension, along which both work. A norm
that has a hook is called at its own place, because the hook sees its input there.
"""

from collections.abc import Callable

from torch import Tensor, is_grad_enabled
from torch.nn import Module

from ..formula import dtype_of
from ..operands import any_requires_grad
from ..ops.limits import why_not_rotated
from ..ops.qk import run_qk, run_rotary
from .later import Later, computed
from .rotary import ONE, PAIR, RotaryCall, can_probe, rotary_of
from .watch import QK, ROTARY, note, watchers

ONE_FROZEN = "of q and k one alone has a gradient"
UNPROVEN = "its function is not known to rotate such q and k: it was exchanged, or gets other arguments"


def norm_and_rotate(rotate: Callable, q, k, cos, sin) -> tuple[Tensor, Tensor]:
    """``rotate(q, k, cos, sin)``, in one launch with the norms of q and k where both are
    put off and that gives the same bits.

    Args:
        q, k: (batch, heads, tokens, head_dim), each a tensor or a `Later`.
        cos, sin: (batch or 1, tokens, columns).
    """
    if type(q) is type(k) is Later:
        rotated = _launched_heads(rotate, PAIR, q, k, cos, sin)
        if watchers:
            reason = _why_apart(q.x, k.x, q.ahead[2], k.ahead[2])
            note(QK, (q.norm, k.norm), q.x, rotated is not None, reason)
        if rotated is not None:
            return rotated
    return rotate(*computed(q, k), cos, sin)


def norm_and_rotate_one(rotate: Callable, x, cos, sin) -> Tensor:
    """``rotate(x, cos, sin, unsqueeze_dim=2)``, in one launch with the norm of x where
    that is put off and gives the same bits.

    Args:
        x: (batch, tokens, heads, head_dim), a tensor or a `Later`.
        cos, sin: as of `norm_and_rotate`.
    """
    if type(x) is Later:
        rotated = None
        if type(x.x) is Tensor and x.x.dim() == 4:
            q = Later(x.norm, x.x.transpose(1, 2), x.ahead)
            no_heads = Later(x.norm, q.x.detach()[:, :0], x.ahead)
            rotated = _launched_heads(rotate, ONE, q, no_heads, cos, sin)
        if watchers:
            note(QK, (x.norm,), x.x, rotated is not None)
        if rotated is not None:
            y, nothing = rotated
            return y.transpose(1, 2)
    (normed,) = computed(x)
    return rotate(normed, cos, sin, unsqueeze_dim=2)


def rotate_together(module: Module, rotate: Callable, q, k, cos, sin, **named) -> tuple:
    """``rotate(q, k, cos, sin, **named)``, in one launch where that gives the same bits.

    Args:
        module: whose forward rotates them.
    """
    rotary = made = None
    heads = q, k
    if type(q) is type(k) is type(cos) is type(sin) is Tensor:
        called = False, tuple(named.items())  # a `RotaryCall` takes longer
        rotary = rotary_of(rotate, called, q, q.dtype, cos)
    if rotary is not None:
        if rotary.transposed and q.dim() == k.dim() == 4:
            heads = q.transpose(1, 2), k.transpose(1, 2)
        made = run_rotary((*heads, cos, sin), rotary)
    if watchers:
        reason = ""
        if rotary is not None:
            reason = why_not_rotated(*heads, cos, sin, rotary.way)
            reason = reason or _why_apart(q, k, None, None)
        elif can_probe(q.device):
            reason = UNPROVEN
        note(ROTARY, (module,), q, made is not None, reason)
    if made is None:
        return rotate(q, k, cos, sin, **named)
    if rotary.transposed:
        yq, yk = made
        return yq.transpose(1, 2), yk.transpose(1, 2)
    return made


def _why_apart(q, k, q_weight, k_weight) -> str:
    """Why heads are not rotated in one launch as they train; "" if they are."""
    of_q = any_requires_grad((q, q_weight))
    if is_grad_enabled() and of_q != any_requires_grad((k, k_weight)):
        return ONE_FROZEN
    return ""


def _launched_heads(
    rotate: Callable, called: RotaryCall, q: Later, k: Later, cos, sin
) -> tuple | None:
    """(q, k), normalised and rotated; None where no single launch does that."""
    patch, launches, q_weight, _ = q.ahead
    k_patch, k_launches, k_weight, _ = k.ahead
    spec = launches.spec
    if spec != k_launches.spec or not (patch.is_plain and k_patch.is_plain):
        return None
    normed_dtype = spec.output_dtype(q.x.dtype, dtype_of(q_weight))
    rotary = rotary_of(rotate, called, q.x, normed_dtype, cos)
    if rotary is None or rotary.transposed != called.one:
        return None
    if not rotary.way.turns_halves:
        return None
    operands = q.x, k.x, q_weight, k_weight, cos, sin
    return run_qk(launches, operands, rotary, (q.unfused, k.unfused))
