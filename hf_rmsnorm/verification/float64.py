"""Run a model in float64: without a copy, and without the casts to float32 inside it.

``model.double()`` is not enough. Most modules of Transformers then still compute part
of their forward in float32, by ``hidden_states.to(torch.float32)`` or ``softmax(...,
dtype=float32)``. Here each operator is widened below the model.
"""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from .quantised import first_dtype, holds_codes, quantised_modules

aten = torch.ops.aten

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
# These only pick elements: picking first and widening after gives the same values
# without a wide copy of the table.
_GATHERS = {aten.embedding, aten.index, aten.index_select}
# These compare the dtypes of their inputs before they reach an operator, so their
# inputs are widened earlier.
_CHECK_DTYPES = {
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    F.scaled_dot_product_attention,
}
# Attention and experts by fused kernels, which take no float64, give way to "eager".
_WITH_FLOAT64 = ("sdpa", "eager")


def widen(value):
    """A floating or complex tensor in double precision, a low-precision dtype replaced
    by double; all else as is.
    """
    if isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    if isinstance(value, torch.Tensor) and value.dtype in _WIDE:
        return value.to(_WIDE[value.dtype])
    return value


def _narrow(dtype: torch.dtype, value):
    """A float64 tensor in another dtype; all else as is."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
        return value.to(dtype)
    return value


@contextmanager
def default_dtype(dtype: torch.dtype):
    """Inside, tensors that are made without a dtype have this one."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _WidenEarly(TorchFunctionMode):
    def __init__(self, mode: "Float64Mode"):
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _CHECK_DTYPES and not self._mode.paused:
            args, kwargs = tree_map(widen, (args, kwargs))
        return func(*args, **kwargs)


def _widened(value):
    """An operand or result of an operator, widened: a third of the time of `tree_map`."""
    if type(value) in (list, tuple):
        return type(value)(map(_widened, value))
    return widen(value)


class Float64Mode(TorchDispatchMode):
    """Inside this mode every floating operator computes in float64, and every cast to a
    narrower float casts to it.

    Parameters, buffers and inputs keep their dtype and are widened when an operator
    reads them, so their values are those of the checkpoint. Results never narrow again:
    ``x.float()``, ``x.to(input_dtype)`` and ``dtype=torch.float32`` arguments all mean
    float64. Stored float32 buffers such as the rotary ``inv_freq`` keep their rounding,
    as they are data. A longrope embedding copies the frequencies for a sequence's
    length over its buffer; that is undone at the end.

    Raises:
        RuntimeError: the model writes anything else in place to a parameter or buffer
            stored in a narrower float.
    """

    def __init__(self):
        super().__init__()
        self._overwritten = []  # (tensor, its value before)
        self.paused = False

    def call_in(self, dtype: torch.dtype, forward: Callable, *args, **kwargs):
        """What `forward` returns where this mode does nothing: its float64 inputs in a
        dtype, its result widened.
        """
        if self.paused:
            return forward(*args, **kwargs)
        self.paused = True
        try:
            args, kwargs = tree_map(partial(_narrow, dtype), (args, kwargs))
            with default_dtype(torch.float32):
                y = forward(*args, **kwargs)
        finally:
            self.paused = False
        return tree_map(widen, y)

    @torch.no_grad()
    def __exit__(self, *error):
        super().__exit__(*error)
        for tensor, before in reversed(self._overwritten):
            tensor.copy_(before)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        is_custom = func.namespace not in ("aten", "prims")
        if is_custom and any(map(holds_codes, tree_iter((args, kwargs)))):
            # float32 is the widest dtype of what reads codes, as dequantize_4bit does
            return self.call_in(torch.float32, func, *args, **kwargs)
        if func is not aten.lift_fresh.default and func.is_view:
            # a view of a stored tensor stays a view; it is widened when it is read
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            written = kwargs.get("out")
            if written is None:
                written = args[0]
            if getattr(written, "dtype", None) in _WIDE:
                self._keep(written, func, *args)
                return func(*args, **kwargs)
        if func.overloadpacket not in _GATHERS:
            args = _widened(args)
            kwargs = {name: _widened(value) for name, value in kwargs.items()}
        y = func(*args, **kwargs)
        return y if func._schema.is_mutable else _widened(y)

    def _keep(self, stored: torch.Tensor, func, *operands) -> None:
        """Keep the values of a tensor that is stored in a narrow dtype, before a write
        that loses nothing.
        """
        # Values that it holds exactly were chosen among stored ones; float64 arithmetic
        # leaves more digits.
        if func is aten.copy_.default:
            value = operands[1]
            rounded = value.to(stored.dtype)
            if torch.equal(value, rounded):
                self._overwritten.append((stored, stored.clone()))
                return
        raise RuntimeError(
            f"the model writes in place to a tensor stored in {stored.dtype} "
            f"({func._schema.name}): its forward cannot be repeated in float64, "
            "compare its parts"
        )


@contextmanager
def _plain_state(model: nn.Module):
    """Choose code paths that exist in float64, and drop all that a forward stores, such
    as grown rotary tables.
    """
    with ExitStack() as stack:
        for module in model.modules():
            for live in (vars(module), module._buffers, module._parameters):
                stack.callback(live.update, dict(live))
                stack.callback(live.clear)
            if isinstance(module, nn.RMSNorm) and module.eps is None:
                # means "that of the input's dtype", widened by now
                module.eps = torch.finfo(torch.float32).eps
            config = getattr(module, "config", None)
            for name in ("_attn_implementation", "_experts_implementation"):
                choice = getattr(config, name, None)
                if isinstance(choice, str) and choice not in _WITH_FLOAT64:
                    stack.callback(setattr, config, name, choice)
                    setattr(config, name, "eager")
        yield


@contextmanager
def in_float64(model: nn.Module):
    """Inside, calls of ``model`` compute in float64 without gradients; the model is the
    same before and after.

    It may be in any floating dtype, on any device that has float64, and so may its
    inputs; floating outputs are float64. Fused kernels (flash attention, grouped
    experts) that take none give way to Transformers' eager code. Modules with quantised
    weights are called in the model's dtype.
    """
    mode = Float64Mode()
    dtype = first_dtype(model)
    with (
        _plain_state(model),
        default_dtype(torch.float64),
        torch.no_grad(),
        mode,
        _WidenEarly(mode),
    ):
        for module in quantised_modules(model):
            vars(module)["forward"] = partial(mode.call_in, dtype, module.forward)
        yield model
