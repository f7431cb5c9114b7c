"""Which functions are rotary embeddings that the kernels compute, and how they rotate, found by running them."""

import itertools
import types
from collections.abc import Callable, Iterable

import torch

from ...fused.attention import is_rotary, proven_rotary
from ...reference import rotated

_FIXED = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, int, float, str, type(None))
WAYS = "", "once", "pairs", "once pairs", "joined", "once joined", "pairs joined", "once pairs joined"
_DTYPES = torch.float32, torch.bfloat16, torch.float16


def prove_rotary(function: Callable | None, pair: Callable | None = None) -> bool:
    """Whether a function rotates q and k as `reference.rotated` does in one of `WAYS`, to the bit; it is run to see.

    pair: what calls it for q and for k, where it takes one of them.
    """
    if not isinstance(function, types.FunctionType):
        return False
    if any(is_rotary(pair or function, False, in_part) is not None for in_part in (False, True)):
        return True  # of another layer
    alike, mixed = [(d, d) for d in _DTYPES], list(itertools.permutations(_DTYPES, 2))

    def way(*how) -> str | None:
        return next((each for each in WAYS if _rotates(pair or function, *how, each)), None)

    whole, in_part = ((way(alike, part), way(mixed, part)) for part in (1, 0.5))
    if whole[0] is in_part[0] is None:
        return False
    functions, named = _named(function)
    held = [value for f in functions for value in f.__defaults__ or ()] + [value for *_, value in named]
    if any(f.__closure__ or f.__kwdefaults__ for f in functions) or not all(isinstance(v, _FIXED) for v in held):
        return False  # what they hold may change while they stay what they are
    proven_rotary[pair or function] = [(f, f.__code__, f.__defaults__) for f in functions], named, (whole, in_part)
    return True


def _named(function: types.FunctionType) -> tuple[list[types.FunctionType], list[tuple[dict, str, object]]]:
    """The functions that a function calls by a global name, itself first; each (globals, name, value) of them."""
    functions, found, waiting = [], [], [function]
    while waiting:
        each = waiting.pop()
        functions.append(each)
        for name in each.__code__.co_names:
            if name in each.__globals__ and (each.__globals__, name) not in [(s, n) for s, n, _ in found]:
                value = each.__globals__[name]
                found.append((each.__globals__, name, value))
                if isinstance(value, types.FunctionType):
                    waiting.append(value)
    return functions, found


def _rotates(function: Callable, dtypes: Iterable[tuple[torch.dtype, torch.dtype]], part: float, way: str) -> bool:
    """Whether it does with q and k, by tables of that part of their columns; of both dtypes of each pair.

    Heads of two sizes are tried, with gradients and without. way: as in `reference.rotated`.
    """
    generator = torch.Generator().manual_seed(0)
    for pair, (length, head_dim), graded in itertools.product(dtypes, ((5, 8), (7, 64)), (False, True)):
        shapes = (2, length, 3, head_dim), (2, length, 2, head_dim), *[(2, length, int(part * head_dim))] * 2
        q, k, cos, sin = (torch.randn(shape, generator=generator) for shape in shapes)
        (q, k), (cos, sin) = ([t.to(dtype) for t in two] for two, dtype in zip(((q, k), (cos, sin)), pair, strict=True))
        q, k = (t.transpose(1, 2).requires_grad_(graded) for t in (q, k))
        with torch.set_grad_enabled(graded):
            try:
                given = function(q, k, cos, sin)
            except Exception:  # a function of other arguments, which any error can say
                return False
            expected = [rotated(x, cos, sin, way=way) for x in (q, k)]
        two = isinstance(given, tuple) and len(given) == 2 and all(isinstance(each, torch.Tensor) for each in given)
        if not two or not all(_same(y, e, x) for y, e, x in zip(given, expected, (q, k), strict=True)):
            return False
    return True


def _same(y: torch.Tensor, expected: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether two functions of x are equal, in bits and strides, and have the same gradient but for the last bits."""
    alike = y.dtype == expected.dtype and y.requires_grad == expected.requires_grad and y.stride() == expected.stride()
    if not (alike and torch.equal(y, expected)):
        return False
    if not y.requires_grad:
        return True
    ours, theirs = (torch.autograd.grad(t, x, torch.ones_like(t), allow_unused=True)[0] for t in (y, expected))
    return ours is not None and bool((ours - theirs).abs().max() <= 0.05 * theirs.abs().max())
