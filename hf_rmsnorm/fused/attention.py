"""The fused part of a patched attention: q norm, k norm and their rotary embedding in
one launch.

A forward calls these functions once it was compiled again from its own source, by
`patching.layers.qk`. The norms wait for the rotation: only transposes stand between,
and those do not move the last dimension, along which both work.
"""

import types
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..formula import NormSpec
from ..ops.direct import under_transform
from ..ops.qk import run_qk
from .layer import operands_ahead
from .norm import launches_for
from .watch import QK, note, watchers

_is_compiling = torch.compiler.is_compiling
# a rotary function that takes q and k; others take one tensor and the dimension of its
# heads, 1 or 2
IN_PAIRS = 0


class NormPair(NamedTuple):
    """Two norms that wait for the rotation, with their weights and formula."""

    q_norm: torch.nn.Module
    k_norm: torch.nn.Module
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    spec: NormSpec


class RotaryProof(NamedTuple):
    """What running a rotary function has shown.

    code, defaults: those that were run. ways: by the dimension of the heads, or
    `IN_PAIRS`: the way of `reference.rotated` in which it rotates, None where
        it is none of these. The key within is (fewer columns rotate than there are, the
        tables have another dtype).
    """

    code: types.CodeType
    defaults: tuple | None
    ways: dict[int, dict[tuple[bool, bool], str | None]]

    def still_holds(self, function: Callable) -> bool:
        return function.__code__ is self.code and function.__defaults__ is self.defaults


rotary_proofs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def pair_to_rotate(q_norm, k_norm) -> NormPair | None:
    """The two norms, if they may be computed where q and k are rotated; None if they
    are to be called where they stand.

    A norm that has a hook is called at its place in the forward, because the hook sees
    its input there.
    """
    if _is_compiling() or under_transform():
        return None
    of_q, of_k = operands_ahead(q_norm), operands_ahead(k_norm)
    if of_q is None or of_k is None:
        return None
    (q_weight, _, spec), (k_weight, _, k_spec) = of_q, of_k
    if spec != k_spec or spec.functional or spec.has_bias:
        return None
    return NormPair(q_norm, k_norm, q_weight, k_weight, spec)


def norm_and_rotate(pair: NormPair | None, rotate: Callable, q, k, cos, sin) -> tuple:
    """(q, k), normalised by a pair that waits, and rotated as ``rotate(q, k, cos,
    sin)`` does.
    """
    if pair is None:
        return rotate(q, k, cos, sin)
    rotated = _in_one_launch(pair, rotate, IN_PAIRS, q, k, cos, sin)
    if watchers:
        note(QK, (pair.q_norm, pair.k_norm), q)
    if rotated is not None:
        return rotated
    return rotate(pair.q_norm(q), pair.k_norm(k), cos, sin)


def norm_both(pair: NormPair | None, q, k) -> tuple:
    """(q, k), normalised by a pair that waits, where the forward does not come to
    rotate them.
    """
    return (q, k) if pair is None else (pair.q_norm(q), pair.k_norm(k))


def norm_and_rotate_one(norm, rotate: Callable, heads_at: int, x, cos, sin):
    """``rotate(norm(x), cos, sin, unsqueeze_dim=heads_at)``, in one launch where that
    gives the same bits.
    """
    pair = pair_to_rotate(norm, norm)
    if pair is not None and type(x) is torch.Tensor and x.dim() == 4:
        q = x.transpose(1, 2) if heads_at == 2 else x
        no_heads = q.detach()[:, :0]
        rotated = _in_one_launch(pair, rotate, heads_at, q, no_heads, cos, sin)
        if watchers:
            note(QK, (norm,), q)
        if rotated is not None:
            return rotated[0].transpose(1, 2) if heads_at == 2 else rotated[0]
    return rotate(norm(x), cos, sin, unsqueeze_dim=heads_at)


def _in_one_launch(
    pair: NormPair, rotate: Callable, heads_at: int, q, k, cos, sin
) -> tuple | None:
    """(q, k), normalised and rotated; None where no single launch does that with the
    same bits.
    """
    if not all(type(t) is torch.Tensor for t in (q, k, cos, sin)):
        return None
    q_weight, k_weight, spec = pair.q_weight, pair.k_weight, pair.spec
    way = _way_of(rotate, heads_at, q, q_weight, spec, cos)
    if way is None:
        return None
    return run_qk(
        launches_for(pair.q_norm, spec), (q, k, q_weight, k_weight, cos, sin), way
    )


def _way_of(
    rotate: Callable, heads_at: int, q, weight, spec: NormSpec, cos
) -> str | None:
    """How a function rotates such operands; None if that is not proven."""
    proof = (
        rotary_proofs.get(rotate) if isinstance(rotate, types.FunctionType) else None
    )
    if proof is None or not proof.still_holds(rotate):
        return None
    in_part = cos.shape[-1] != q.shape[-1]
    normed_dtype = spec.output_dtype(q.dtype, None if weight is None else weight.dtype)
    return proof.ways.get(heads_at, {}).get((in_part, normed_dtype != cos.dtype))
