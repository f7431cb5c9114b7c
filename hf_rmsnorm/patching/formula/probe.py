"""Runs a module's forward on a private CPU copy, so that recognising a norm touches
nothing of the user's.
"""

import contextlib
import copy
import inspect
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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


class Unusable(Exception):
    """Why a module cannot be probed."""


class DrawsRandom(Exception):
    """Its forward draws random numbers. This is raised before any is drawn."""


class Probe:
    """A copy of a module on the CPU, hooks left behind, whose tensors and attributes
    can be set for each run.

    A run takes and gives rows, (..., hidden_size), however the module wants its input.

    Raises:
        Unusable: the module cannot be copied.
    """

    def __init__(self, module: torch.nn.Module):
        self.module = _copy(module)
        forward = type(module).forward
        # A forward under @torch.compile is probed as it was written; compiling it would
        # take seconds.
        self._forward = getattr(forward, "_torchdynamo_orig_callable", forward)
        self._shapes = {
            name: t.shape for name, t in own_tensors(self.module) if t.dim() in (1, 2)
        }
        # Lengths, 0 where not known. A tensor of (heads, head_dim) counts and is set as
        # one row; if there is one, the module gets (..., heads, head_dim) for each row.
        self.sizes = {name: shape.numel() for name, shape in self._shapes.items()}
        self.head_dim = next(
            (shape[1] for shape in self._shapes.values() if len(shape) == 2), None
        )
        plain = plain_attributes(module).items()
        self.numbers = {
            k: v
            for k, v in plain
            if isinstance(v, (int, float)) and not isinstance(v, bool)
        }
        # how rows are put to the module, as in `Recipe`
        self.layout, self.dims = "last", None
        # (gate, factor of x, factor of the output) for runs that name no gate
        self.neutral = None
        _, self.gate, self.gate_required = inputs(type(module)) or (None, None, False)
        if self.gate_required:
            self.require_gate()

    def require_gate(self) -> None:
        """Give every run a gate, wide open where none is named."""
        self.gate_required, self.neutral = True, (64.0, 1.0, 1.0)

    def set(self, **values) -> None:
        """Set tensors (as rows) or plain attributes of the copy."""
        module = self.module
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                # a copy, for forwards that write to their weight
                value = value.detach().clone().requires_grad_(value.requires_grad)
                if len(self._shapes.get(name, ())) == 2:
                    value = value.view(self._shapes[name])
            if name in module._parameters:
                module._parameters[name] = Parameter(
                    value, requires_grad=value.requires_grad
                )
            elif name in module._buffers:
                module._buffers[name] = value
            else:
                module.__dict__[name] = value

    @contextlib.contextmanager
    def having(self, **values) -> Iterator[None]:
        """`set`, until the context ends."""
        before = {name: getattr(self.module, name) for name in values}
        self.set(**values)
        try:
            yield
        finally:
            self.set(**before)

    @contextlib.contextmanager
    def with_gradients(self, of_weights: bool) -> Iterator[None]:
        """The module where gradients are computed, of its parameters too or of its
        input alone.
        """
        parameters = [
            p
            for p in self.module._parameters.values()
            if p is not None and p.is_floating_point()
        ]
        try:
            for parameter in parameters:
                parameter.requires_grad_(of_weights)
            with torch.enable_grad():
                yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(False)

    def run(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """The output for a copy of x; `Unusable` if that is anything but one floating
        tensor of x's shape.
        """
        written = x.clone()
        y = self._call(written, gate)
        if written._version:
            raise Unusable("it writes into its input")
        return y

    def run_without_chance(self, x: torch.Tensor) -> torch.Tensor:
        """`run`; `DrawsRandom` before any random number is drawn."""
        with _RefuseRandom():
            return self.run(x)

    def torch_norm(
        self, x: torch.Tensor, gate: torch.Tensor | None = None
    ) -> str | None:
        """What torch's own F.layer_norm or F.rms_norm does of a run.

        ``"all"``: its output is the module's. ``"hat"``: it normalises the input
        without weight or bias. None: neither.
        """
        x = x.clone()
        with _NotedNorms() as noted:
            y = self._call(x, gate)
        of_x = [call for call in noted.calls if _same_memory(call.x, x)]
        if any(_same_memory(call.y, y) for call in of_x):
            return "all"
        return "hat" if any(call.alone for call in of_x) else None

    def run_as_given(self, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """The module's own output for an input of the shape and strides that it is
        given.
        """
        try:
            return self._forward(
                self.module, x, **({} if gate is None else {self.gate: gate})
            )
        except DrawsRandom:
            raise
        except Exception as error:  # a user's forward may raise anything
            line = str(error).strip().split("\n")[0]
            raise Unusable(
                f"its forward fails on one input tensor: {type(error).__name__}: {line}"
            ) from error

    def _call(self, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        rows, factor = x, 1.0
        if gate is None and self.neutral is not None:
            value, before, factor = self.neutral
            gate = torch.full_like(x, value)
            rows = x if before == 1.0 else x * before
        rows = self.present(rows)
        y = self.run_as_given(rows, None if gate is None else self.present(gate))
        if not isinstance(y, torch.Tensor):
            raise Unusable(f"it returns {type(y).__name__}, not one tensor")
        if y.shape != rows.shape or not y.is_floating_point():
            raise Unusable(f"it turns shape {tuple(rows.shape)} into {tuple(y.shape)}")
        if self.layout == "channels_first":
            y = y.movedim(1, -1)
        y = y.reshape(x.shape)
        return y if factor == 1.0 else y * factor

    def present(self, x: torch.Tensor) -> torch.Tensor:
        """Rows as the module takes them."""
        *leading, size = x.shape
        row = (
            [size] if self.head_dim is None else [size // self.head_dim, self.head_dim]
        )
        if self.dims is not None and len(leading) + len(row) not in self.dims:
            rows = math.prod(leading)
            first = leading[0] if leading else 1
            leading = [first, rows // first, 1, 1][: max(self.dims) - len(row)]
            if len(leading) < 2:
                leading = [rows]
        x = x.reshape(*leading, *row)
        return x.movedim(-1, 1) if self.layout == "channels_first" else x


class _NormCall(NamedTuple):
    """A call of one of torch's own norms; `alone`: without weight and bias."""

    x: object
    y: torch.Tensor
    alone: bool


class _NotedNorms(TorchFunctionMode):
    """Notes the calls of torch's own norms."""

    def __init__(self):
        super().__init__()
        self.calls: list[_NormCall] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        y = func(*args, **kwargs)
        if func in TORCH_NORMS:
            tensors = [
                value
                for value in (*args, *kwargs.values())
                if isinstance(value, torch.Tensor)
            ]
            x = args[0] if args else kwargs.get("input")
            self.calls.append(_NormCall(x, y, len(tensors) == 1))
        return y


class _RefuseRandom(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise DrawsRandom("its forward draws random numbers")
        return func(*args, **(kwargs or {}))


def _same_memory(a, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and (a.data_ptr(), a.numel(), a.dtype) == (
        b.data_ptr(),
        b.numel(),
        b.dtype,
    )


@contextlib.contextmanager
def neutral_modes() -> Iterator[None]:
    """Whatever context the caller is in (inference mode, autocast, fake tensors), probe
    in a plain one.
    """
    # A default device is a mode that slows every operator down, so one is set only to
    # hide another.
    hidden = (
        torch.device("cpu")
        if torch._C._len_torch_function_stack()
        else contextlib.nullcontext()
    )
    plain = torch.autocast("cpu", enabled=False)
    with (
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        plain,
        hidden,
    ):
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
    plain = {}
    for cls in reversed(type(module).__mro__):
        if cls not in torch.nn.Module.__mro__:
            plain.update(
                (k, v)
                for k, v in vars(cls).items()
                if not k.startswith("__") and is_plain(v)
            )
    return plain | {k: v for k, v in own_attributes(module).items() if is_plain(v)}


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
    try:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        # a builtin or otherwise opaque callable has no signature
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        p
        for p in parameters
        if p.kind in (*kinds, inspect.Parameter.KEYWORD_ONLY) and p.default is p.empty
    ]
    if (
        not needed
        or needed[0] is not parameters[0]
        or len(needed) > 2
        or needed[1:] not in ([], parameters[1:2])
    ):
        return None
    second = parameters[1] if len(parameters) > 1 else None
    if (
        second is None
        or second.kind is not kinds[1]
        or second.default not in (second.empty, None)
    ):
        return None if len(needed) == 2 else (parameters[0].name, None, False)
    return parameters[0].name, second.name, len(needed) == 2


def _copy(module: torch.nn.Module) -> torch.nn.Module:
    copied = object.__new__(type(module))
    torch.nn.Module.__init__(copied)
    copied.training = False
    memo = {id(module): copied}
    for name, value in own_attributes(module).items():
        # What cannot be copied (locks, process groups, other modules) is left out: a
        # forward that needs it fails.
        with contextlib.suppress(Exception):
            copied.__dict__[name] = _copy_value(value, memo)
    try:
        for name, t in module._parameters.items():
            if t is not None:  # DeepSpeed ZeRO-3 keeps the true shape in `ds_shape`
                dtype = torch.float32 if t.is_floating_point() else t.dtype
                t = Parameter(
                    torch.ones(getattr(t, "ds_shape", t.shape), dtype=dtype),
                    requires_grad=False,
                )
            copied._parameters[name] = t
        for name, t in module._buffers.items():
            copied._buffers[name] = None if t is None else _copy_value(t, memo)
    except Exception as error:  # tensor types of others may refuse in any way
        raise Unusable(
            f"its tensors cannot be copied: {type(error).__name__}: {error}"
        ) from error
    copied._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    return copied


def _copy_value(value, memo):
    inside = (
        value
        if isinstance(value, (list, tuple, set))
        else getattr(value, "__dict__", {}).values()
    )
    if isinstance(value, torch.nn.Module) or any(
        isinstance(v, torch.nn.Module) for v in inside
    ):
        raise TypeError("it holds another module outside its children")
    if isinstance(value, torch.Tensor):
        return (
            torch.ones_like(value, device="cpu")
            if value.is_meta
            else value.detach().cpu().clone()
        )
    return copy.deepcopy(value, memo)
