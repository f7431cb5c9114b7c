"""Which functions are rotary embeddings that the kernels compute, and how they rotate,
found by running them.
"""

import itertools
import types
from collections.abc import Callable

import torch

from ...fused.attention import IN_PAIRS, RotaryProof, rotary_proofs
from ...reference import rotated

WAYS = "", "once", "joined"  # of `reference.rotated`
_DTYPES = torch.float32, torch.bfloat16, torch.float16
_SAME_DTYPES = tuple(zip(_DTYPES, _DTYPES, strict=True))
_OTHER_DTYPES = tuple(itertools.permutations(_DTYPES, 2))
_SIZES = (5, 8), (7, 64)  # length and head_dim


def is_rotary(function: Callable | None, heads_at: int = IN_PAIRS) -> bool:
    """Whether a function rotates as `reference.rotated` does in one of `WAYS`, to the
    bit; the function is run to see.

    Args:
        heads_at: the function takes one tensor, with its heads in this dimension; or
            `IN_PAIRS`, q and k.
    """
    if (
        not isinstance(function, types.FunctionType)
        or function.__closure__
        or function.__kwdefaults__
    ):
        return False
    proof = rotary_proofs.get(function)
    if proof is None or not proof.still_holds(function):
        proof = RotaryProof(function.__code__, function.__defaults__, {})
        rotary_proofs[function] = proof
    if heads_at not in proof.ways:
        proof.ways[heads_at] = _ways_of(_in_pairs(function, heads_at))
    return any(
        proof.ways[heads_at].get((in_part, False)) is not None
        for in_part in (False, True)
    )


def _in_pairs(function: Callable, heads_at: int) -> Callable:
    """A function of one tensor as one of q and k, (batch, heads, length, head_dim)."""
    if heads_at == IN_PAIRS:
        return function

    def one(x, cos, sin):
        if heads_at == 2:
            return function(x.transpose(1, 2), cos, sin, unsqueeze_dim=2).transpose(
                1, 2
            )
        return function(x, cos, sin, unsqueeze_dim=1)

    return lambda q, k, cos, sin: (one(q, cos, sin), one(k, cos, sin))


def _ways_of(function: Callable) -> dict[tuple[bool, bool], str | None]:
    """How a function rotates; by whether fewer columns rotate than there are, and
    whether the tables' dtype differs.
    """
    ways = {}
    for in_part, dtypes_differ in itertools.product((False, True), repeat=2):
        dtypes = _OTHER_DTYPES if dtypes_differ else _SAME_DTYPES
        alike = (
            way
            for way in WAYS
            if all(_rotates(function, way, in_part, *pair) for pair in dtypes)
        )
        ways[in_part, dtypes_differ] = next(alike, None)
    return ways


def _rotates(
    function: Callable,
    way: str,
    in_part: bool,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
) -> bool:
    """Whether it rotates heads of two sizes in this way, with gradients and without."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape, dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    for (length, head_dim), graded in itertools.product(_SIZES, (False, True)):
        columns = head_dim // 2 if in_part else head_dim
        cos, sin = (random(2, length, columns, dtype=table_dtype) for _ in range(2))
        q, k = (
            random(2, length, heads, head_dim, dtype=dtype).transpose(1, 2)
            for heads in (3, 2)
        )
        q.requires_grad_(graded)
        k.requires_grad_(graded)
        with torch.set_grad_enabled(graded):
            try:
                result = function(q, k, cos, sin)
            except Exception:  # a function of other arguments, which any error can say
                return False
            expected = [rotated(x, cos, sin, way=way) for x in (q, k)]
        if not isinstance(result, tuple) or len(result) != 2:
            return False
        if not all(
            _same(y, e, x) for y, e, x in zip(result, expected, (q, k), strict=True)
        ):
            return False
    return True


def _same(y, expected: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether two functions of x are equal, in bits and strides, and have the same
    gradient but for the last bits.
    """
    if not isinstance(y, torch.Tensor) or y.requires_grad != expected.requires_grad:
        return False
    if (
        y.dtype != expected.dtype
        or y.stride() != expected.stride()
        or not torch.equal(y, expected)
    ):
        return False
    if not y.requires_grad:
        return True
    ours, theirs = (
        torch.autograd.grad(t, x, torch.ones_like(t), allow_unused=True)[0]
        for t in (y, expected)
    )
    return ours is not None and bool(
        (ours - theirs).abs().max() <= 0.05 * theirs.abs().max()
    )
