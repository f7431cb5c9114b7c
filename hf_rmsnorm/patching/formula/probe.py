"""Runs a module's forward on a private CPU copy, so that recognising a norm touches
nothing of the user's.
"""

import contextlib
import inspect
import warnings
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import Module
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ...ops.backend import autocast_enabled
from .plain_code import own_values
from .refusals import Unusable

TORCH_NORMS = (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
AUTOCAST_DEVICES = ("cpu", "cuda")  # that norms are tried on
OPEN_GATE = 64.0  # one number for all elements; silu and sigmoid are far from zero


class Probe:
    """A copy of a module on the CPU, without hooks, that is run on rows: (rows,
    row size).

    Attributes:
        shapes: those of the module's tensors. A tensor of (heads, head_dim) counts and
            is set as one row; if there is one, the module gets (..., heads, head_dim).
        gate: name of the forward's second input, None if it has none.
        gate_required: whether that must be given; it is open in a run that names none.
        row_dim, dims: the dimension in which rows are put to the module, and how many
            there are.
    """

    def __init__(self, module: Module):
        self.module = _copy(module)
        self.shapes: dict[str, torch.Size] = {}
        self.head_dim: int | None = None
        for name, value in vars(self.module).items():
            dims = value.dim() if isinstance(value, Tensor) else 0
            if dims == 2:
                self.head_dim = value.shape[1]
            if dims in (1, 2):
                self.shapes[name] = value.shape
        self.gate, self.gate_required = second_input(type(module))
        self.row_dim = -1
        self.dims = 3

    def set(self, **values) -> None:
        """Set tensors (as rows) or plain attributes of the copy."""
        for name, value in values.items():
            if isinstance(value, Tensor) and len(self.shapes[name]) == 2:
                value = value.view(self.shapes[name])
            vars(self.module)[name] = value

    def run(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """The output for rows; `Unusable` if that is anything but one tensor of their
        shape.
        """
        if gate is None and self.gate_required:
            gate = torch.full_like(x, OPEN_GATE)
        rows = self.present(x)
        if gate is not None:
            gate = self.present(gate)
        y = self.call(rows, gate)
        if not isinstance(y, Tensor) or y.shape != rows.shape:
            raise Unusable("it does not return one tensor of its input's shape")
        return y.movedim(self.row_dim, -1).reshape(x.shape)

    def call(self, x: Tensor, gate: Tensor | None) -> Tensor:
        """The module's own output for an input of the shape and strides that it is
        given.
        """
        gates = {} if gate is None else {self.gate: gate}
        try:
            return type(self.module).forward(self.module, x, **gates)
        except Exception as error:  # a user's forward may raise anything
            line = str(error).strip().split("\n")[0]
            raise Unusable(
                f"its forward fails on one input tensor: {type(error).__name__}: {line}"
            ) from error

    def present(self, rows: Tensor) -> Tensor:
        """Rows as the module takes them: each dimension but the first and the row's own
        has size two, or one for a single row.
        """
        row = rows.shape[1:]
        if self.head_dim is not None:
            row = (rows.shape[1] // self.head_dim, self.head_dim)
        leading = [min(2, len(rows))] * (self.dims - len(row))
        if leading:
            leading[0] = -1
        return rows.reshape(*leading, *row).movedim(-1, self.row_dim)


class OnDevice(TorchFunctionMode):
    """Has tensors on the CPU say that they are on another type of device. There torch's
    own norms cast to float32 while autocast is on, so they do so here too.

    Attributes:
        calls_norm: whether one of torch's own norms was called.
    """

    def __init__(self, device_type: str):
        super().__init__()
        self.device = torch.device(device_type)
        self.calls_norm = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == Tensor.device.__get__:
            return self.device
        if func in TORCH_NORMS:
            self.calls_norm = True
            if self.device.type != "cpu" and autocast_enabled(self.device.type):
                args, kwargs = tree_map_only(Tensor, Tensor.float, (args, kwargs))
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def autocast(device_type: str, dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast to a dtype on a type of device, which need not be there; None switches
    it off.
    """
    was_on = torch.is_autocast_enabled(device_type)
    before = torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, dtype is not None)
    torch.set_autocast_dtype(device_type, dtype or before)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no such device
            yield
    finally:
        torch.set_autocast_enabled(device_type, was_on)
        torch.set_autocast_dtype(device_type, before)


@contextlib.contextmanager
def neutral_modes() -> Iterator[None]:
    """A plain context for whatever is proven by running it, as the proof is kept:
    outside of the caller's inference mode, autocast, default device, fake tensors and
    other modes, and functorch transforms. Gradients are off.
    """
    contexts = (
        temporarily_clear_interpreter_stack(),  # of functorch
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        *[autocast(device_type, None) for device_type in AUTOCAST_DEVICES],
        torch.device("cpu"),
    )
    with contextlib.ExitStack() as stack:
        while _len_torch_function_stack():  # default devices are there too
            stack.enter_context(_pop_mode_temporarily())
        for context in contexts:
            stack.enter_context(context)
        yield


def true_shape(tensor: Tensor) -> torch.Size:
    # DeepSpeed ZeRO-3 keeps it in `ds_shape`
    return getattr(tensor, "ds_shape", tensor.shape)


def second_input(cls: type) -> tuple[str | None, bool]:
    """(name of the forward's second parameter, whether it must be given); None without
    one that must be given or is None by default, as a gate is.
    """
    parameters = inspect.signature(cls.forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    _, *arguments = [p for p in parameters if p.kind not in variable]
    needed = [p.default for p in arguments].count(inspect.Parameter.empty)
    if needed not in (1, 2):
        raise Unusable(
            "its forward takes something other than one tensor, and perhaps a gate"
        )
    for second in arguments[1:2]:
        if needed == 2 or second.default is None:
            return second.name, needed == 2
    return None, False


def _copy(module: Module) -> Module:
    """A module of the same class with the same plain values, and ones for tensors."""
    copied = object.__new__(type(module))
    Module.__init__(copied)
    for name, value in own_values(module).items():
        if isinstance(value, Tensor):
            value = torch.ones(true_shape(value), dtype=torch.float32)
        vars(copied)[name] = value
    return copied
