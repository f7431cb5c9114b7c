"""What a patched attention runs: q norm, k norm and the rotary embedding behind them in one launch.

The norms are put off, from where the forward calls them to where it rotates: what lies between are views that do not
touch the last dimension, and both the norm and the rotary embedding work along that alone.
"""

import functools
import types
import weakref
from collections.abc import Callable

import torch

from ..formula import NormSpec
from ..ops import fused_qk_norm, qk_norm_backend, resolve_backend
from ..ops.direct import version
from ..ops.norm import plan_of
from ..ops.qk import qk_launch_key, qk_plan_of
from .layer import observers, operands_ahead, tell

_is_compiling = torch.compiler.is_compiling
_CALL = torch.nn.Module.__call__
# A rotary function that was proven -> the functions that it calls with their code, and all that they name, which are to
# be the same whenever it is not run; whether it promotes as plain arithmetic does where dtypes differ; and whether it
# rotates the first columns where its tables have fewer.
proven_rotary: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def norm_later(attention: torch.nn.Module, held: dict, name: str, x):
    """x as it is, its norm left to `norm_and_rotate`; or normalised, where that would not compute it in one launch."""
    norm = attention._modules.get(name)
    if norm is None:
        return getattr(attention, name)(x)
    found = _put_off(norm, x)
    if found is None:
        return norm(x)
    held[name] = found
    return x


def _put_off(norm: torch.nn.Module, x) -> tuple | None:
    """(weight, bias, formula, key, versions of x and the weight) of a norm that can be computed of x later; or None."""
    called = _is_compiling() or type(x) is not torch.Tensor or type(norm).__call__ is not _CALL
    found = None if called else operands_ahead(norm)
    if found is None or (found[0] is not None and found[0].dim() != 1):
        return None
    weight, bias, spec = found
    casts = spec.functional or spec.rounding == "every_step"  # as `qk_norm_backend` asks
    plans = type(norm)._hf_rmsnorm_plans
    key, plan = plans.find(x, weight, bias, casts)
    if not plan:
        backend = resolve_backend(x, weight, bias, spec)
        if backend == "original" or not type(norm)._hf_rmsnorm_recipe.fits(x, weight, bias):
            return None
        if key is not None:
            plans.keep(key, backend, plan_of, x, weight, bias, spec)
    return weight, bias, spec, key, version(x), version(weight)


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
    q_name, k_name = names
    of_q, of_k = held.get(q_name), held.get(k_name)
    for of_x, name, x in ((of_q, q_name, q), (of_k, k_name, k)):
        if of_x is not None and (version(x) != of_x[4] or version(of_x[0]) != of_x[5]):
            raise RuntimeError(f"what {name} is yet to read was written to: patch the model with fuse_residual=False")
    if of_q is not None and of_k is not None:
        done = _in_one_launch(attention, names, of_q, of_k, rotate, q, k, *tables)
        if done is not None:
            return done
    q, k = (x if held.get(n) is None else attention._modules[n](x) for n, x in zip(names, (q, k), strict=True))
    return (q, k) if rotate is None else rotate(q, k, *tables)


def _in_one_launch(attention: torch.nn.Module, names: tuple[str, str], of_q, of_k, rotate, q, k, *tables):
    """(q, k), normalised and rotated; None where that is not one launch. of_q and of_k: what `_put_off` returned."""
    q_weight, q_bias, spec, q_key, *_ = of_q
    k_weight, k_bias, k_spec, k_key, *_ = of_k
    if q_bias is not None or k_bias is not None or not (spec is k_spec or spec == k_spec):
        return None
    if observers:
        tell(attention, "q/k", (names, rotate), (q, k, *tables))
    if rotate is not None:
        in_part = getattr(tables[0], "shape", ())[-1:] != q.shape[-1:]
        if not is_rotary(rotate, _dtypes_differ(q, q_weight, spec, tables[0]), in_part):
            return None
    plans = type(attention._modules[names[0]])._hf_rmsnorm_plans
    key = qk_launch_key(q_key, k_key, q, k, *tables)
    plan, backend = None if key is None else plans.get(key), "triton"
    if plan is None:
        backend = qk_norm_backend(q, k, q_weight, k_weight, spec, *tables)
        plan = key and plans.keep(key, backend, qk_plan_of, q, k, q_weight, spec, *tables[:1])
    if backend == "original" or (
        backend == "reference" and of_q is of_k
    ):  # one tensor, which plain torch reads as it is
        return None
    return fused_qk_norm(q, k, q_weight, k_weight, spec, *tables, backend=backend, plan=plan)


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


def is_rotary(function: Callable, dtypes_differ: bool = False, in_part: bool = False) -> bool:
    """Whether a function was proven for such operands, and nothing that it calls has been exchanged since."""
    proven = proven_rotary.get(function) if isinstance(function, types.FunctionType) else None
    if proven is None or (dtypes_differ and not proven[2]) or (in_part and not proven[3]):
        return False
    for called, code in proven[0]:
        if called.__code__ is not code:  # autoreload puts another into the function that is there
            return False
    return all(names.get(name) is value for names, name, value in proven[1])
