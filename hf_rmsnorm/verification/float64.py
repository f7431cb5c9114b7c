"""Run a model in float64: without a copy, and without the casts to float32 inside it.

``model.double()`` is not enough. Most modules of Transformers then still compute part
of their forward in float32, by ``hidden_states.to(torch.float32)`` or ``softmax(...,
dtype=float32)``. Here each operator is widened below the model.
"""

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from .quantised import holds_codes, own_dtype, quantised_modules

aten = torch.ops.aten

_WIDE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
_WIDE |= dict.fromkeys((torch.complex32, torch.complex64), torch.complex128)
# These only pick elements: picking first and widening after gives the same values
# without a wide copy of the table.
_GATHERS = {aten.embedding, aten.index, aten.index_select}
# These compare the dtypes of their inputs before they reach an operator, so their
# inputs are widened earlier.
_CHECK_DTYPES = {
    getattr(F, f"{name}{n}d") for name in ("conv", "conv_transpose") for n in (1, 2, 3)
}
_CHECK_DTYPES.add(F.scaled_dot_product_attention)
_NAMESPACES_OF_TORCH = ("aten", "prims")
_WITH_FLOAT64 = {
    "_attn_implementation": ("sdpa", "eager"),
    "_experts_implementation": ("eager",),
}


def widen(value):
    """A floating or complex tensor in double precision, a low-precision dtype replaced
    by double; all else as is.
    """
    if _is_narrow(value):
        return value.to(torch.complex128 if value.is_complex() else torch.float64)
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _widened(value):
    return widen(value) if _is_narrow(value) else value


def _is_narrow(value) -> bool:
    floating = isinstance(value, torch.Tensor) and (
        value.is_floating_point() or value.is_complex()
    )
    return floating and value.dtype not in (torch.float64, torch.complex128)


def _narrow_to(dtype: torch.dtype, value):
    """A float64 tensor in another dtype; all else as is."""
    return (
        value.to(dtype)
        if isinstance(value, torch.Tensor) and value.dtype == torch.float64
        else value
    )


def _holds_narrow(value) -> bool:
    """Whether `widen` changes anything in an argument; nearly always not, and then it
    need not be taken apart.
    """
    if isinstance(value, (list, tuple)):
        return any(map(_holds_narrow, value))
    return value in _WIDE if isinstance(value, torch.dtype) else _is_narrow(value)


@cache
def _facts(func) -> tuple[list[bool], bool]:
    """(which arguments an operator writes to, whether it takes a dtype)"""
    arguments = func._schema.arguments
    written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    return written if any(written) else [], any(a.name == "dtype" for a in arguments)


class _WidenEarly(TorchFunctionMode):
    def __init__(self, mode: "Float64Mode"):
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _CHECK_DTYPES and not self._mode.paused:
            args, kwargs = tree_map(widen, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class Float64Mode(TorchDispatchMode):
    """Inside this mode every floating operator computes in float64, and every cast to a
    narrower float casts to it.

    Parameters, buffers and inputs keep their dtype and are widened when an operator
    reads them, so their values are those of the checkpoint. Results never narrow again:
    ``x.float()``, ``x.to(input_dtype)`` and ``dtype=torch.float32`` arguments all mean
    float64. Two things keep their rounding, as they are data: stored float32 buffers
    such as the rotary ``inv_freq``, and constants that a forward makes with
    ``torch.tensor(0.1)``. A longrope embedding copies the frequencies for a sequence's
    length over its buffer; that is undone at the end.

    Raises:
        RuntimeError: the model writes anything else in place to a parameter or buffer
            stored in a narrower float.
    """

    def __init__(self):
        super().__init__()
        self._overwritten: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.paused = False

    def call_in(self, dtype: torch.dtype, forward: Callable, *args, **kwargs):
        """What `forward` returns where this mode does nothing: its float64 inputs in a
        dtype, its result widened.
        """
        before, self.paused = self.paused, True
        try:
            args, kwargs = tree_map(partial(_narrow_to, dtype), (args, kwargs))
            y = forward(*args, **kwargs)
        finally:
            self.paused = before
        return y if before else tree_map(_widened, y)

    @torch.no_grad()
    def __exit__(self, *error):
        super().__exit__(*error)
        for tensor, before in reversed(self._overwritten):
            tensor.copy_(before)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        written, takes_dtype = _facts(func)
        if func.namespace not in _NAMESPACES_OF_TORCH and any(
            map(holds_codes, tree_iter((args, kwargs)))
        ):
            return self._read_codes(func, written, args, kwargs)
        if func is not aten.lift_fresh.default and func.is_view:
            # a view of a stored tensor stays a view; it is widened when it is read
            return func(*args, **kwargs)
        stored = _stored_that_is_written(func, written, args, kwargs)
        if stored is not None:
            return self._write_to(stored, func, args, kwargs)
        if func.overloadpacket not in _GATHERS and _holds_narrow(
            [*args, *kwargs.values()]
        ):
            args, kwargs = tree_map(widen, (args, kwargs))
        if (
            takes_dtype
            and not written
            and not any(isinstance(a, torch.Tensor) for a in args)
        ):
            return _made_in_double(func, args, kwargs)
        y = func(*args, **kwargs)
        return y if written else _wide(y)

    def _read_codes(self, func, written: list[bool], args: tuple, kwargs: dict):
        """Call an operator that reads codes, as bitsandbytes' dequantize_4bit does:
        float32 is its widest dtype.
        """
        if written:
            raise RuntimeError(
                f"{func._schema.name} writes in place: its forward cannot be repeated in float64"
            )
        return self.call_in(torch.float32, func, *args, **kwargs)

    def _write_to(self, stored: torch.Tensor, func, args: tuple, kwargs: dict):
        """Write to a tensor that is stored in a narrow dtype, if it can be undone and
        loses nothing.
        """
        # Values that it holds exactly were chosen among stored ones; float64 arithmetic
        # leaves more digits.
        if func is aten.copy_.default and bool(
            (args[1] == args[1].to(stored.dtype)).all()
        ):
            self._overwritten.append((stored, stored.clone()))
            return func(*args, **kwargs)
        where = f"a tensor stored in {stored.dtype} ({func._schema.name})"
        raise RuntimeError(
            f"the model writes in place to {where}: its forward cannot be repeated in float64"
        )


def _stored_that_is_written(
    func, written: list[bool], args: tuple, kwargs: dict
) -> torch.Tensor | None:
    """The first narrow tensor that an operator writes to."""
    if not written:
        return None
    rest = (
        kwargs.get(argument.name) for argument in func._schema.arguments[len(args) :]
    )
    for write, value in zip(written, (*args, *rest), strict=False):
        if write and _is_narrow(value):
            return value
    return None


def _made_in_double(func, args: tuple, kwargs: dict):
    """What an operator makes of no tensor, in float64 where it would make it in a
    narrow dtype.
    """
    if kwargs.get("dtype") is None and any(isinstance(a, float) for a in args):
        # the lowest float64, say, is no number of the default dtype
        kwargs = {**kwargs, "dtype": torch.float64}
    y = func(*args, **kwargs)
    if _is_narrow(y):
        # made in the default dtype
        y = func(*args, **{**kwargs, "dtype": _WIDE.get(y.dtype, y.dtype)})
    return _wide(y)


def _wide(y):
    return widen(y) if isinstance(y, torch.Tensor) else tree_map(_widened, y)


@contextmanager
def _plain_state(model: torch.nn.Module):
    """Choose code paths that exist in float64, and drop all that a forward stores, such
    as grown rotary tables.
    """
    saved = [
        (live, dict(live))
        for m in model.modules()
        for live in (vars(m), m._buffers, m._parameters)
    ]
    choices = _choices_without_float64(model)
    try:
        for config, name, _ in choices:
            setattr(config, name, "eager")
        for m in model.modules():
            if isinstance(m, torch.nn.RMSNorm) and m.eps is None:
                # means "that of the input's dtype", widened by now
                m.eps = torch.finfo(torch.float32).eps
        yield
    finally:
        for config, name, chosen in choices:
            setattr(config, name, chosen)
        for live, before in saved:
            _restore(live, before)


def _choices_without_float64(model: torch.nn.Module) -> list[tuple]:
    """(config, name, value) of each choice of a fused kernel that takes no float64."""
    configs = {
        id(m.config): m.config
        for m in model.modules()
        if getattr(m, "config", None) is not None
    }
    choices = []
    for config in configs.values():
        for name, with_float64 in _WITH_FLOAT64.items():
            chosen = getattr(config, name, None)
            if isinstance(chosen, str) and chosen not in with_float64:
                choices.append((config, name, chosen))
    return choices


def _restore(live: dict, before: dict) -> None:
    """Undo the changes of a dictionary, and write no value that has not changed."""
    for name in live.keys() - before.keys():
        del live[name]
    live.update(
        {name: value for name, value in before.items() if live.get(name) is not value}
    )


@contextmanager
def in_float64(model: nn.Module, dtypes: Mapping[nn.Module, torch.dtype] | None = None):
    """Inside, calls of ``model`` compute in float64 without gradients; the model is the
    same before and after.

    It may be in any floating dtype, on any device that has float64, and so may its
    inputs; floating outputs are float64. Fused kernels (flash attention, grouped
    experts) that take none give way to Transformers' eager code. Modules with quantised
    weights are called in the dtype that ``dtypes`` says, or else in the model's.
    """
    mode, usual = Float64Mode(), own_dtype(model)
    with _plain_state(model), torch.no_grad(), mode, _WidenEarly(mode):
        for module in quantised_modules(model):
            dtype = (dtypes or {}).get(module, usual)
            vars(module)["forward"] = partial(mode.call_in, dtype, module.forward)
        yield model
