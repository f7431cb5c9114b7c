"""Which functions are rotary embeddings that the kernels compute, and how they rotate,
found by running them.
"""

import itertools
import types
from collections.abc import Callable

import torch

from ...fused.attention import RotaryProof, rotary_proofs
from ...reference import rotated

WAYS = "", "once", "joined"  # of `reference.rotated`
_DTYPES = torch.float32, torch.bfloat16, torch.float16
_SIZES = (5, 8), (7, 64)  # length and head_dim


def is_rotary(function: Callable | None, one: bool = False) -> bool:
    """Whether a function rotates as `reference.rotated` does in one of `WAYS`, to the
    bit; the function is run to see.

    Args:
        one: the function takes one tensor, and ``unsqueeze_dim=2``; else q and k.
    """
    if type(function) is not types.FunctionType:
        return False
    if function.__closure__ or function.__kwdefaults__:
        return False
    proof = rotary_proofs.get(function)
    if proof is None or not proof.still_holds(function):
        proof = RotaryProof(function.__code__, function.__defaults__, {})
        rotary_proofs[function] = proof
    for in_part, dtypes_differ in itertools.product((False, True), repeat=2):
        case = one, in_part, dtypes_differ
        if case not in proof.ways:
            proof.ways[case] = _way_of(_rotating(function, one), in_part, dtypes_differ)
    whole, part = proof.ways[one, False, False], proof.ways[one, True, False]
    return whole is not None or part is not None


def _rotating(function: Callable, one: bool) -> Callable:
    """A function of q and k, (batch, heads, length, head_dim)."""

    def each(q, k, cos, sin):
        turned = (x.transpose(1, 2) for x in (q, k))
        results = [function(x, cos, sin, unsqueeze_dim=2) for x in turned]
        return tuple(y.transpose(1, 2) for y in results)

    return each if one else function


def _way_of(function: Callable, in_part: bool, dtypes_differ: bool) -> str | None:
    """How a function rotates; None if in none of `WAYS`.

    Args:
        in_part: fewer columns rotate than there are.
        dtypes_differ: the tables have another dtype.
    """
    pairs = itertools.product(_DTYPES, repeat=2)
    pairs = [pair for pair in pairs if (pair[0] != pair[1]) == dtypes_differ]
    for way in WAYS:
        if all(_rotates(function, way, in_part, *pair) for pair in pairs):
            return way
    return None


def _rotates(
    function: Callable,
    way: str,
    in_part: bool,
    dtype: torch.dtype,
    table_dtype: torch.dtype,
) -> bool:
    """Whether it rotates heads of two sizes in this way, with their gradients."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape, dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    for length, head_dim in _SIZES:
        columns = head_dim // 2 if in_part else head_dim
        cos, sin = (random(2, length, columns, dtype=table_dtype) for _ in range(2))
        q, k = (random(2, length, n, head_dim, dtype=dtype) for n in (3, 2))
        inputs = [x.transpose(1, 2).requires_grad_() for x in (q, k)]
        with torch.enable_grad():
            try:
                results = function(*inputs, cos, sin)
            except Exception:  # a function of other arguments, which any error can say
                return False
            expected = [rotated(x, cos, sin, way=way) for x in inputs]
        if not isinstance(results, tuple) or len(results) != 2:
            return False
        if not all(map(_same, results, expected, inputs)):
            return False
    return True


def _same(y, expected: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether two functions of x are equal, in bits and strides, and have the same
    gradient but for the last bits.
    """
    if not isinstance(y, torch.Tensor) or not y.requires_grad:
        return False
    if (y.dtype, y.stride()) != (expected.dtype, expected.stride()):
        return False
    if not torch.equal(y, expected):
        return False
    ours, theirs = (
        torch.autograd.grad(t, x, torch.ones_like(t), allow_unused=True)[0]
        for t in (y, expected)
    )
    if ours is None:
        return False
    return bool((ours - theirs).abs().max() <= 0.05 * theirs.abs().max())
