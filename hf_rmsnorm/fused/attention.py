"""What a patched attention runs: q norm, k norm and the rotary embedding behind them in one launch.

The norms are put off, from where the forward calls them to where it rotates. What lies between are views that do not
touch the last dimension, along which alone both work; or, of a norm over all heads, the view that makes heads of it.
"""

import functools
import types
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch

from ..formula import NormSpec
from ..ops import fused_qk_norm, qk_norm_backend, resolve_backend
from ..ops.direct import version
from ..ops.norm import plan_of
from ..ops.qk import qk_launch_key, qk_plan_of
from ..reference import as_normed, by_heads
from .layer import observers, operands_ahead, tell

_is_compiling = torch.compiler.is_compiling
_CALL = torch.nn.Module.__call__
# A rotary function that was proven -> the functions that it calls, with their code and defaults, and all that they
# name, which are to be the same whenever it is not run; by whether the tables have fewer columns, how it rotates, in
# the words of `reference.rotated`, where they have the dtype of what they turn and where not (None: in no known way).
proven_rotary: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def norm_later(attention: torch.nn.Module, held: dict, side: int, name: str, x, spans: bool = False):
    """x as it is, its norm left to `norm_and_rotate`; or normalised, where that would not compute it in one launch.

    Args:
        side: 0 of q, 1 of k.
        spans: heads are made of x, (batch, length, heads * head_dim), behind the norm.
    """
    norm = attention._modules.get(name)
    if norm is None:
        return getattr(attention, name)(x)
    found = _put_off(norm, x)
    # That one norm spans all heads is known later by its weight.
    if found is None or spans != (x.dim() == 3) or (spans and (found[0] is None or not x.is_contiguous())):
        return norm(x)
    held[side] = found
    return x


def _put_off(norm: torch.nn.Module, x) -> tuple | None:
    """What is kept of a norm that can be computed of x later, or None.

    That is weight, bias, formula, key, the versions of x and of the weight, and x.
    """
    called = _is_compiling() or type(x) is not torch.Tensor or type(norm).__call__ is not _CALL
    found = None if called else operands_ahead(norm)
    if found is None or (found[0] is not None and found[0].dim() > 2):
        return None
    weight, bias, spec = found
    plans = type(norm)._hf_rmsnorm_plans
    key, plan = plans.find(x, weight, bias, spec.functional)
    if not plan:
        backend = resolve_backend(x, weight, bias, spec)
        if backend == "original" or not type(norm)._hf_rmsnorm_recipe.fits(x, weight, bias):
            return None
        if key is not None:
            plans.keep(key, backend, plan_of, x, weight, bias, spec)
    return weight, bias, spec, key, version(x), version(weight), x


def norm_and_rotate(
    attention: torch.nn.Module, held: dict, names: tuple[str, str], rotate: Callable | None, q, k, *tables
):
    """(q, k) with the norms that were put off, and rotated; a RuntimeError where what they read was written to since.

    Args:
        rotate: ``rotate(q, k, *tables)`` as the forward calls it; None where it does not.
        tables: cos and sin.
    """
    if not held:
        return (q, k) if rotate is None else rotate(q, k, *tables)
    of_q, of_k = held.pop(0, None), held.pop(1, None)
    for of_x, name, x in zip((of_q, of_k), names, (q, k), strict=True):
        if of_x is not None and (version(x) != of_x[4] or version(of_x[0]) != of_x[5]):
            raise RuntimeError(f"what {name} is yet to read was written to: patch the model with fuse_residual=False")
    if of_q is not None and of_k is not None:
        done = _in_one_launch(attention, names, of_q, of_k, rotate, q, k, *tables)
        if done is not None:
            return done
    sides = zip((of_q, of_k), names, (q, k), strict=True)
    q, k = (x if of_x is None else _normed(attention._modules[name], of_x, x) for of_x, name, x in sides)
    return (q, k) if rotate is None else rotate(q, k, *tables)


def _normed(norm: torch.nn.Module, of_x: tuple, x):
    """A norm that was put off, of x as it is viewed since."""
    weight, *_, before = of_x
    if x is before or weight is None or weight.shape == x.shape[-1:]:
        return norm(x)
    if weight.dim() == 1 and not _heads_of(x, before):
        raise RuntimeError("heads were made in another way than when it was patched: patch it with fuse_residual=False")
    return by_heads(norm(as_normed(x, weight)), x, weight)


def _heads_of(x: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether x, (batch, heads, length, head_dim), is (batch, length, heads * head_dim) rows, seen so."""
    if x.dim() != 4 or rows.dim() != 3 or x.storage_offset() != rows.storage_offset():
        return False
    (batch, heads, length, head_dim), (of_batch, of_row, _) = x.shape, rows.stride()
    strides = zip(x.shape, x.stride(), (of_batch, head_dim, of_row, 1), strict=True)
    return rows.shape == (batch, length, heads * head_dim) and all(n == 1 or a == b for n, a, b in strides)


def _in_one_launch(attention: torch.nn.Module, names: tuple[str, str], of_q, of_k, rotate, q, k, *tables):
    """(q, k), normalised and rotated; None where that is not one launch. of_q and of_k: what `_put_off` returned."""
    q_weight, q_bias, spec, q_key, *_, q_rows = of_q
    k_weight, k_bias, k_spec, k_key, *_, k_rows = of_k
    as_read = q is q_rows and k is k_rows
    # What `F.layer_norm` returns is row-major as it was read: seen otherwise since, it would lie otherwise in memory.
    if not (spec is k_spec or spec == k_spec) or (spec.functional and not as_read):
        return None
    of_each = q_weight is not None and q_weight.dim() == 2
    length_first = as_read and q.dim() == k.dim() == 4 and (of_each or q.shape[2] != k.shape[2])
    if length_first and rotate is not None:
        return None
    if length_first:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if observers and q.dim() == 4:
        tell(attention, "q/k", (names, rotate), (q, k, *tables))
    way = ""
    if rotate is not None:
        in_part = getattr(tables[0], "shape", ())[-1:] != q.shape[-1:]
        way = is_rotary(rotate, _dtypes_differ(q, q_weight, spec, tables[0]), in_part)
        if way is None:
            return None
    plans = type(attention._modules[names[0]])._hf_rmsnorm_plans
    key = qk_launch_key(q_key, k_key, q, k, *tables)
    if way:
        key = key and (key, way)
    plan, backend = None if key is None else plans.get(key), "triton"
    biases = {} if q_bias is None else {"q_bias": q_bias, "k_bias": k_bias}
    if plan is None:
        backend = qk_norm_backend(q, k, q_weight, k_weight, spec, *tables, **biases)
        spans = any(w is not None and w.dim() == 1 and w.shape != q.shape[-1:] for w in (q_weight, k_weight))
        if spans and not (_heads_of(q, q_rows) and _heads_of(k, k_rows)):
            return None
        if length_first and spec.functional and not all(_in_order(t) for t in (q, k)):
            return None
        # What lies so is, seen by heads, row-major in the strides of what was read.
        planned = replace(spec, functional=False) if length_first else spec
        cos = tables[0] if tables else None
        plan = key and plans.keep(key, backend, qk_plan_of, q, k, (q_weight, k_weight), planned, cos, way)
        if plan is None and length_first and spec.functional:
            return None
    # Plain torch reads one tensor, and one as the norm read it, as it is.
    if backend == "original" or (backend == "reference" and (of_q is of_k or length_first)):
        return None
    q, k = fused_qk_norm(q, k, q_weight, k_weight, spec, *tables, **biases, way=way, backend=backend, plan=plan)
    return (q.transpose(1, 2), k.transpose(1, 2)) if length_first else (q, k)


def _in_order(x: torch.Tensor) -> bool:
    """Whether x, (batch, heads, length, head_dim), lies in memory as a row-major (batch, length, heads, head_dim)."""
    of_batch, of_head, of_position, _ = x.stride()
    return of_batch >= of_position >= of_head


def norm_and_turn(attention: torch.nn.Module, name: str, rotate: Callable, dim: int, x, cos, sin):
    """``rotate(norm(x), cos, sin, unsqueeze_dim=dim)``, in one launch where that is the same."""
    norm = attention._modules.get(name)
    found = None if norm is None or not isinstance(rotate, types.FunctionType) else _put_off(norm, x)
    if found is not None and x.dim() == 4:
        q = x.transpose(1, 2) if dim == 2 else x
        k = q.detach()[:, :0]  # no heads: the launch is of one tensor
        done = _in_one_launch(attention, (name, name), found, found, as_pair(rotate, dim), q, k, cos, sin)
        if done is not None:
            return done[0].transpose(1, 2) if dim == 2 else done[0]
    return rotate(getattr(attention, name)(x), cos, sin, unsqueeze_dim=dim)


@functools.cache
def as_pair(rotate: Callable, dim: int) -> Callable:
    """What rotates q and k, (batch, heads, length, head_dim), by a function that takes one with heads in `dim`."""

    @functools.wraps(rotate)
    def both(q, k, cos, sin):
        if dim == 1:
            return tuple(rotate(x, cos, sin, unsqueeze_dim=1) for x in (q, k))
        return tuple(rotate(x.transpose(1, 2), cos, sin, unsqueeze_dim=2).transpose(1, 2) for x in (q, k))

    return both


def _dtypes_differ(x: torch.Tensor, weight: torch.Tensor | None, spec: NormSpec, table) -> bool:
    """Whether what is rotated, the normalised x, has another dtype than the table that it is rotated by."""
    dtype = getattr(table, "dtype", None)
    if x.dtype == dtype and (weight is None or weight.dtype == dtype):
        return False
    return dtype != spec.output_dtype(x.dtype, None if weight is None else weight.dtype)


def is_rotary(function: Callable, dtypes_differ: bool = False, in_part: bool = False) -> str | None:
    """How a function rotates such operands; None if that is not proven, or what it calls was exchanged since."""
    proven = proven_rotary.get(function) if isinstance(function, types.FunctionType) else None
    if proven is None:
        return None
    for called, code, defaults in proven[0]:  # autoreload puts others into the function that is there
        if called.__code__ is not code or called.__defaults__ is not defaults:
            return None
    same = all(names.get(name) is value for names, name, value in proven[1])
    return proven[2][in_part][dtypes_differ] if same else None
