"""Runs a module's forward on a private CPU copy, so that recognising a norm touches
nothing of the user's.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

PLAIN_TYPES = (bool, int, float, str, type(None), torch.dtype, torch.device)
# What any module's instance may hold: parameters, hooks and the like, of which the copy
# starts with fresh ones, and a forward that accelerate's hooks or another patcher have
# set on it, where the copy runs the class's own.
_MODULE_STATE = {
    *vars(torch.nn.Module()),
    "_compiled_call_impl",
    "forward",
    "_old_forward",
    "_hf_hook",
}
TORCH_NORMS = (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)


class Neutral(NamedTuple):
    """The gate of a run that names none, and factors of x and of the output."""

    gate: float
    before: float = 1.0
    after: float = 1.0


class Unusable(Exception):
    """Why a module cannot be probed."""


class Probe:
    """A copy of a module on the CPU, without hooks, that is run on rows: (rows,
    row size).

    Attributes:
        sizes: the number of elements of each floating tensor of the module, 0 where it
            is not known. A tensor of (heads, head_dim) counts and is set as one row; if
            there is one, the module gets (..., heads, head_dim).
        layout, dims: how rows are put to the module, and in how many dimensions.
    """

    def __init__(self, module: torch.nn.Module):
        self.module = _copy(module)
        forward = type(module).forward
        # A forward under @torch.compile is probed as it was written; compiling it would
        # take seconds.
        self._forward = getattr(forward, "_torchdynamo_orig_callable", forward)
        self._heads: dict[str, torch.Size] = {}
        self.head_dim: int | None = None
        self.sizes: dict[str, int] = {}
        for name, tensor in own_tensors(self.module):
            if tensor.dim() in (1, 2):
                self.sizes[name] = tensor.numel()
            if tensor.dim() == 2:
                self._heads[name] = tensor.shape
                self.head_dim = tensor.shape[1]
        self.numbers: dict[str, float] = {}
        for name, value in plain_attributes(module).items():
            if type(value) in (int, float):
                self.numbers[name] = value
        self.layout = "last"
        self.dims = 3
        self.neutral: Neutral | None = None
        _, self.gate, self.gate_required = inputs(type(module))
        if self.gate_required:
            self.open_gate()

    def open_gate(self) -> None:
        """Give every run a gate, wide open where none is named."""
        self.neutral = Neutral(64.0)

    def set(self, **values) -> None:
        """Set tensors (as rows) or plain attributes of the copy."""
        module = self.module
        for name, value in values.items():
            if name in self._heads:
                value = value.view(self._heads[name])
            store = module.__dict__
            if name in module._parameters:
                store = module._parameters
            elif name in module._buffers:
                store = module._buffers
            store[name] = value

    def run(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """The output for rows; `Unusable` if that is anything but one floating tensor
        of their shape.
        """
        neutral = self.neutral if gate is None else None
        if neutral is not None:
            gate = torch.full_like(x, neutral.gate)
            x = x * neutral.before
        rows = self.present(x.clone())
        if gate is not None:
            gate = self.present(gate)
        y = self.call(rows, gate)
        if not isinstance(y, torch.Tensor):
            raise Unusable(f"it returns {type(y).__name__}, not one tensor")
        if y.shape != rows.shape or not y.is_floating_point():
            raise Unusable(f"it turns shape {tuple(rows.shape)} into {tuple(y.shape)}")
        if rows._version:
            raise Unusable("it writes into its input")
        if self.layout == "channels_first":
            y = y.movedim(1, -1)
        y = y.reshape(x.shape)
        if neutral is not None:
            y = y * neutral.after
        return y

    def call(self, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """The module's own output for an input of the shape and strides that it is
        given.
        """
        gates = {} if gate is None else {self.gate: gate}
        try:
            return self._forward(self.module, x, **gates)
        except Exception as error:  # a user's forward may raise anything
            line = str(error).strip().split("\n")[0]
            raise Unusable(
                f"its forward fails on one input tensor: {type(error).__name__}: {line}"
            ) from error

    def present(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as the module takes them."""
        count, size = rows.shape
        row = (size,)
        if self.head_dim is not None:
            row = (size // self.head_dim, self.head_dim)
        inner = self.dims - 1 - len(row)  # leading dimensions but the first
        leading = ()
        if inner == 0:
            leading = (count,)
        elif inner > 0:
            size = 1 if count % 2**inner else 2
            leading = (*[size] * inner, count // size**inner)
        x = rows.reshape(*leading, *row)
        if self.layout == "channels_first":
            x = x.movedim(-1, 1)
        return x

    def torch_norm(self, x: torch.Tensor, autocast: bool) -> str | None:
        """What torch's own F.layer_norm or F.rms_norm does of a run on half-precision
        rows.

        ``"all"``: its output is the module's. ``"hat"``: it normalises without weight
        or bias, and what follows keeps its dtype. None: neither.

        Args:
            autocast: as under an accelerator's autocast.
        """
        with _NotedNorms(autocast) as norms:
            y = self.run(x)
        for output, alone in norms.calls:
            if output.data_ptr() == y.data_ptr():
                return "all"
            if alone and output.dtype == y.dtype:
                return "hat"
        return None


class _NotedNorms(TorchFunctionMode):
    """Notes the calls of torch's own norms on half-precision input: (output, whether
    without weight and bias). Autocast on an accelerator gives float32 from them.
    """

    def __init__(self, autocast: bool):
        super().__init__()
        self.autocast = autocast
        self.calls: list[tuple[torch.Tensor, bool]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        y = func(*args, **kwargs)
        if func in TORCH_NORMS and y.dtype != torch.float32:
            if self.autocast:
                y = y.float()
            operands = [*args, *kwargs.values()]
            count = sum(isinstance(operand, torch.Tensor) for operand in operands)
            self.calls.append((y, count == 1))
        return y


@contextlib.contextmanager
def neutral_modes() -> Iterator[None]:
    """Whatever context the caller is in (inference mode, autocast, fake tensors), probe
    in a plain one.
    """
    hidden = contextlib.nullcontext()
    if torch._C._len_torch_function_stack():
        # A default device is a mode that slows every operator down, so one is set only
        # to hide another.
        hidden = torch.device("cpu")
    autocast = torch.autocast("cpu", enabled=False)
    inference = torch.inference_mode(False)
    with _disable_current_modes(), inference, torch.no_grad(), autocast, hidden:
        yield


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own floating tensors: parameters, buffers, plain attributes; none of
    its children's.
    """
    for store in (module._parameters, module._buffers, module.__dict__):
        for name, tensor in store.items():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                yield name, tensor


def plain_attributes(module: torch.nn.Module) -> dict[str, object]:
    """Attributes that hold plain values (numbers, strings, flags, tuples of them), the
    class's own ones included.
    """
    attributes = {}
    for cls in reversed(type(module).__mro__):
        if cls not in torch.nn.Module.__mro__:
            attributes |= vars(cls)
    attributes |= own_attributes(module)
    plain = {}
    for name, value in attributes.items():
        if is_plain(value) and not name.startswith("__"):
            plain[name] = value
    return plain


def own_attributes(module: torch.nn.Module) -> dict[str, object]:
    """The attributes of the instance that not every module has."""
    return {
        name: value for name, value in vars(module).items() if name not in _MODULE_STATE
    }


def is_plain(value) -> bool:
    """Whether a value is a number, a flag, a word, a dtype, None, or a tuple of these."""
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(v, PLAIN_TYPES) for v in values)


def inputs(cls: type) -> tuple[str, str | None, bool] | None:
    """(name of the forward's first parameter, of its second, whether that must be
    given); None if it needs more.

    A second parameter counts if it has no default, or None: so a forward takes a gate.
    Otherwise its name is None.
    """
    collecting = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        _, *parameters = inspect.signature(cls.forward).parameters.values()
    except (TypeError, ValueError):
        # a builtin or otherwise opaque callable has no signature
        return None
    parameters = [p for p in parameters if p.kind not in collecting]
    needed = [p for p in parameters if p.default is p.empty]
    if len(needed) not in (1, 2) or needed != parameters[: len(needed)]:
        return None
    gate = None
    for second in parameters[1:2]:
        if second in needed or second.default is None:
            gate = second.name
    return parameters[0].name, gate, len(needed) == 2


def _copy(module: torch.nn.Module) -> torch.nn.Module:
    """A module of the same class with the same plain attributes, and ones for
    tensors.
    """
    copied = object.__new__(type(module))
    torch.nn.Module.__init__(copied)
    stores = (
        (module._parameters, copied._parameters),
        (module._buffers, copied._buffers),
        (own_attributes(module), copied.__dict__),
    )
    for store, into in stores:
        for name, value in store.items():
            if isinstance(value, torch.Tensor):
                dtype = torch.float32 if value.is_floating_point() else value.dtype
                # DeepSpeed ZeRO-3 keeps the true shape in `ds_shape`
                shape = getattr(value, "ds_shape", value.shape)
                into[name] = torch.ones(shape, dtype=dtype)
            elif is_plain(value):
                into[name] = value
    return copied
