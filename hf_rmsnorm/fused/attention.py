"""The fused part of a patched attention: the rotary embedding of q and k in one launch,
with their norms if they have any.

A forward calls these functions once it was compiled again from its own source, by
`patching.layers.qk` or `rotary_rewrite`. They ask `rotary` how the function rotates, and
call `ops.qk`. The norms wait for the rotation: only transposes
stand between, and those do not move the last dimension, along which both work. A norm
that has a hook is called at its own place, because the hook sees its input there.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn import Module

from ..formula import dtype_of
from ..ops.limits import why_not_rotated
from ..ops.qk import run_qk, run_rotary
from .layer import operands_ahead
from .rotary import ONE, PAIR, RotaryCall, can_probe, rotary_of
from .watch import QK, ROTARY, note, watchers

UNPROVEN = "its function is not known to rotate such q and k: it was exchanged, or gets other arguments"


class Waiting(NamedTuple):
    """Norms that wait for the rotation, and what `operands_ahead` says of each."""

    norms: tuple
    ahead: tuple

    def unfused(self, at: int, x: Tensor) -> Tensor:
        """x through the own forward of the norm of q (0) or of k (1)."""
        at = min(at, len(self.norms) - 1)
        patch, *_ = self.ahead[at]
        return patch.unfused(self.norms[at], x)


def waiting(*norms) -> Waiting | None:
    """The norms, if all may be computed where the forward rotates; None if one has to
    be called at its own place, as `operands_ahead` says.
    """
    ahead = tuple(map(operands_ahead, norms))
    if None not in ahead:
        return Waiting(norms, ahead)
    if watchers:
        note(QK, norms, None, False)
    return None


def norm_now(norms: Waiting | None, norm, rows):
    """``norm(rows)``; the rows, where the norms wait for the rotation."""
    if norms is None:
        return norm(rows)
    return rows


def norm_and_rotate(
    norms: Waiting | None, rotate: Callable, q, k, cos, sin
) -> tuple[Tensor, Tensor]:
    """(q, k), normalised by two norms, and rotated as ``rotate(q, k, cos, sin)`` does.

    Args:
        norms: None where they were called, or where the forward did not come to them.
        q, k: (batch, heads, tokens, head_dim).
        cos, sin: (batch or 1, tokens, columns).
    """
    if norms is None:
        return rotate(q, k, cos, sin)
    rotated = _launched_heads(norms, rotate, PAIR, q, k, cos, sin)
    if watchers:
        note(QK, norms.norms, q, rotated is not None)
    if rotated is not None:
        return rotated
    return rotate(*norm_each(norms, q, k), cos, sin)


def norm_and_rotate_one(norms: Waiting | None, rotate: Callable, x, cos, sin) -> Tensor:
    """``rotate(norm(x), cos, sin, unsqueeze_dim=2)`` by the one norm, in one launch
    where that gives the same bits.

    Args:
        norms, cos, sin: as of `norm_and_rotate`.
        x: (batch, tokens, heads, head_dim).
    """
    if norms is None:
        return rotate(x, cos, sin, unsqueeze_dim=2)
    rotated = None
    if type(x) is Tensor and x.dim() == 4:
        q = x.transpose(1, 2)
        no_heads = q.detach()[:, :0]
        rotated = _launched_heads(norms, rotate, ONE, q, no_heads, cos, sin)
    if watchers:
        note(QK, norms.norms, x, rotated is not None)
    if rotated is not None:
        y, nothing = rotated
        return y.transpose(1, 2)
    (normed,) = norm_each(norms, x)
    return rotate(normed, cos, sin, unsqueeze_dim=2)


def rotate_together(
    module: Module, rotate: Callable, q, k, cos, sin, *more, **named
) -> tuple:
    """``rotate(q, k, cos, sin, *more, **named)``, in one launch where that gives the
    same bits.

    Args:
        module: whose forward rotates them.
    """
    rotary = made = None
    heads = q, k
    if type(q) is type(k) is type(cos) is type(sin) is Tensor:
        called = False, more, tuple(named.items())  # a `RotaryCall` takes longer
        rotary = rotary_of(rotate, called, q, q.dtype, cos)
    if rotary is not None:
        if rotary.transposed and q.dim() == k.dim() == 4:
            heads = q.transpose(1, 2), k.transpose(1, 2)
        made = run_rotary((*heads, cos, sin), rotary)
    if watchers:
        reason = ""
        if rotary is not None:
            reason = why_not_rotated(*heads, cos, sin, rotary.way)
        elif can_probe(q.device):
            reason = UNPROVEN
        note(ROTARY, (module,), q, made is not None, reason)
    if made is None:
        return rotate(q, k, cos, sin, *more, **named)
    if rotary.transposed:
        yq, yk = made
        return yq.transpose(1, 2), yk.transpose(1, 2)
    return made


def norm_each(norms: Waiting | None, *heads: Tensor) -> list[Tensor]:
    """Heads of q, or of q and k, each normalised by its own norm if that waits.

    The forward may have transposed them since: no element moves by that.
    """
    if norms is None:
        return [*heads]
    return [norm(x) for norm, x in zip(norms.norms, heads, strict=True)]


def _launched_heads(
    norms: Waiting, rotate: Callable, called: RotaryCall, q, k, cos, sin
) -> tuple | None:
    """(q, k), normalised and rotated; None where no single launch does that."""
    patch, launches, q_weight, _ = norms.ahead[0]
    k_patch, k_launches, k_weight, _ = norms.ahead[-1]
    spec = launches.spec
    if spec != k_launches.spec or spec.functional or spec.has_bias:
        return None
    if not (patch.is_plain and k_patch.is_plain):
        return None
    normed_dtype = spec.output_dtype(q.dtype, dtype_of(q_weight))
    rotary = rotary_of(rotate, called, q, normed_dtype, cos)
    if rotary is None or rotary.transposed != called.one:
        return None
    if not rotary.way.turns_halves:
        return None
    operands = q, k, q_weight, k_weight, cos, sin
    return run_qk(launches, operands, rotary, norms.unfused)
