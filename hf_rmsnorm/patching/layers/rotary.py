"""Which functions are rotary embeddings that the kernels compute, and how they rotate,
found by running them.
"""

import contextlib
import itertools
import types
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ...formula import Rotation
from ...fused.attention import PAIR, RotaryCall, RotaryProof, rotary_proofs
from ...reference import rotated
from ..formula.probe import neutral_modes
from .rotary_code import functions_read

_COLUMNS = (  # of `Rotation`: reads_pairs, writes_pairs, tables
    (False, False, "all"),
    (False, False, "half"),
    (True, True, "all"),
    (True, True, "first"),
    (True, False, "first"),
)
_RESULTS = (  # once, casts_twice, joined
    (False, False, False),
    (True, True, False),
    (True, False, False),
    (False, False, True),
)
WAYS = [
    Rotation(*result, *columns, transposed)
    for transposed in (False, True)
    for columns in _COLUMNS
    for result in _RESULTS
]
_DTYPES = torch.float32, torch.bfloat16, torch.float16
_SIZES = (5, 8), (7, 64)  # length and head_dim


def prove_rotary(function: Callable | None, called: RotaryCall = PAIR) -> bool:
    """Note in `rotary_proofs` how a function that is called so rotates: as
    `reference.rotated` does in one of `WAYS`, to the bit. The function is run to see,
    once its source shows that it takes every input through the same steps.

    Returns:
        Whether it rotates so.
    """
    if type(function) is not types.FunctionType or function.__kwdefaults__:
        return False
    proof = rotary_proofs.get(function)
    if proof is None or not proof.still_holds(function):
        reads = functions_read(function)
        if reads is None:
            return False
        proof = RotaryProof(function.__code__, function.__defaults__, reads, {})
        rotary_proofs[function] = proof
    for in_part, dtypes_differ in itertools.product((False, True), repeat=2):
        case = called, in_part, dtypes_differ
        if case in proof.ways:
            continue
        # a function of something else may raise anything, and another time nothing
        with contextlib.suppress(Exception), neutral_modes(), torch.enable_grad():
            proof.ways[case] = _way(function, *case)
    return any(proof.ways.get((called, in_part, False)) for in_part in (False, True))


def _way(function: Callable, *case) -> Rotation | None:
    """In which of `WAYS` a function rotates in a case; None if in none of them.

    Raises:
        Exception: in none of them, and the function has raised this.
    """
    raised = []
    for way in WAYS:
        try:
            if _rotates(function, way, *case):
                return way
        except Exception as error:
            raised.append(error)
    if raised:
        raise raised[0]
    return None


def _rotates(
    function: Callable,
    way: Rotation,
    called: RotaryCall,
    in_part: bool,
    dtypes_differ: bool,
) -> bool:
    """Whether a function rotates heads of two sizes in this way, with their gradients.

    Args:
        in_part: the tables have fewer columns than q and k.
        dtypes_differ: the tables have another dtype.

    Raises:
        Exception: what the function raises.
    """
    if way.transposed and not (called.more or called.named):
        return False  # called so, it gets three dimensions, which no kernel serves
    generator = torch.Generator().manual_seed(0)
    cases = itertools.product(_DTYPES, _DTYPES, _SIZES)
    for dtype, table_dtype, (length, head_dim) in cases:
        if (dtype != table_dtype) != dtypes_differ:
            continue
        columns = head_dim // 2 if in_part else head_dim
        tables = torch.randn(2, 2, length, columns, generator=generator)
        cos, sin = tables.to(table_dtype)
        inputs = []
        for heads in (3, 2):
            x = torch.randn(2, length, heads, head_dim, generator=generator).to(dtype)
            x = x if way.transposed else x.transpose(1, 2)
            inputs.append(x.requires_grad_())
        results = _results(function, called, inputs, cos, sin)
        try:
            for x, y in zip(inputs, results, strict=True):
                if not _same(x, y, rotated(x, cos, sin, way)):
                    return False
        except Exception:  # it may return anything, and such tables may not be read so
            return False
    return True


def _results(
    function: Callable, called: RotaryCall, inputs: list, cos, sin
) -> Iterable:
    """What a function makes of q and k."""
    behind = cos, sin, *called.more
    named = dict(called.named)
    if called.one:
        return [function(x, *behind, **named) for x in inputs]
    return function(*inputs, *behind, **named)


def _same(x: Tensor, y: Tensor, expected: Tensor) -> bool:
    """Whether two functions of x are equal, in bits and strides, and have the same
    gradient.
    """
    if y.dtype != expected.dtype or y.stride() != expected.stride():
        return False
    if not torch.equal(y, expected):
        return False
    dy = expected.detach()  # not ones, whose products with cos and sin are exact
    (ours,) = torch.autograd.grad(y, x, dy)
    (theirs,) = torch.autograd.grad(expected, x, dy)
    return torch.equal(ours, theirs)
