"""Runs a module's forward on a private CPU copy, so that recognising a norm touches nothing of the user's."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# What nn.Module keeps on every instance: parameters, hooks and the like. The copy starts with fresh ones.
MODULE_STATE = frozenset(torch.nn.Module().__dict__) | {"_compiled_call_impl"}
# A forward set on the instance, by accelerate's hooks or another patcher. The copy runs the class's own forward.
INSTANCE_FORWARDS = frozenset({"forward", "_old_forward", "_hf_hook"})
TORCH_NORMS = (F.layer_norm, torch.layer_norm, F.rms_norm, torch.rms_norm)
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class Unusable(Exception):
    """Why a module cannot be probed."""


class DrawsRandom(Unusable):
    """Its forward draws random numbers; found out before any was drawn."""


class Probe:
    """A copy of a module on the CPU, hooks left behind, whose tensors and attributes can be set for each run.

    Args:
        module: any module on any device, meta included; only its shapes, dtypes, buffers and attributes are read.

    Attributes:
        sizes: length of each floating one-dimensional parameter or buffer, by name; 0 where it is not known.
        numbers: value of each int or float attribute, by name.
        faults: what the runs so far did that no norm formula does, in words.

    Raises:
        Unusable: the module cannot be copied.
    """

    def __init__(self, module: torch.nn.Module):
        self.module = _copy(module)
        self.faults: list[str] = []
        forward = type(module).forward
        # A forward under @torch.compile is probed as it was written; compiling it would take seconds.
        self._forward = getattr(forward, "_torchdynamo_orig_callable", forward)
        self.sizes = {name: t.shape[0] for name, t in own_tensors(self.module) if t.dim() == 1}
        self.numbers = {
            name: value
            for name, value in plain_attributes(module).items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }

    def set(self, **values) -> None:
        """Set tensors or plain attributes of the copy."""
        for name, value in values.items():
            if name in self.module._parameters:
                self.module._parameters[name] = Parameter(value, requires_grad=value.requires_grad)
            elif name in self.module._buffers:
                self.module._buffers[name] = value
            else:
                self.module.__dict__[name] = value

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """The output for a copy of x.

        Raises:
            Unusable: the forward fails, or returns anything but one floating tensor of x's shape.
        """
        given = x.clone()
        y = self._call(given)
        if not torch.equal(given.nan_to_num(), x.nan_to_num()):
            self._blame("it writes into its input")
        return y

    def run_watched(self, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """`run`, and whether the output is that of torch's own F.layer_norm or F.rms_norm on the input itself.

        A call for which the forward switched autocast on or off does not count: autocast changes what they return.

        Raises:
            DrawsRandom: its forward would draw random numbers.
            Unusable: as `run`.
        """
        attributes, tensors = self._attributes(), {name: t.clone() for name, t in own_tensors(self.module)}
        given, autocast = x.clone(), _autocast_state()
        with _NormCalls() as calls, _RefuseRandom():
            y = self._call(given)
        after = dict(own_tensors(self.module))
        same = after.keys() == tensors.keys() and all(torch.equal(t, after[name]) for name, t in tensors.items())
        if not same or self._attributes() != attributes:
            self._blame("its forward changes the module's own state")
        return y, any(x_ is given and y_ is y and state == autocast for x_, y_, state in calls.made)

    def _call(self, x: torch.Tensor) -> torch.Tensor:
        try:
            y = self._forward(self.module, x)
        except Unusable:
            raise
        except Exception as error:  # a user's forward may raise anything
            line = str(error).strip().split("\n")[0]
            raise Unusable(f"its forward fails on one input tensor: {type(error).__name__}: {line}") from error
        if not isinstance(y, torch.Tensor):
            raise Unusable(f"it returns {type(y).__name__}, not one tensor")
        if y.shape != x.shape or not y.is_floating_point():
            raise Unusable(f"it turns shape {tuple(x.shape)} into {tuple(y.shape)}")
        return y

    def _blame(self, fault: str) -> None:
        if fault not in self.faults:
            self.faults.append(fault)

    def _attributes(self) -> list:
        return [
            (name, len(value) if isinstance(value, (list, dict, set)) else value if is_plain(value) else id(value))
            for name, value in self.module.__dict__.items()
            if name not in MODULE_STATE
        ]


class _RefuseRandom(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise DrawsRandom("its forward draws random numbers")
        return func(*args, **(kwargs or {}))


class _NormCalls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in TORCH_NORMS:
            self.made.append((args[0] if args else kwargs.get("input"), result, _autocast_state()))
        return result


def _autocast_state() -> list[bool]:
    return [torch.is_autocast_enabled(device_type) for device_type in ("cpu", "cuda")]


@contextlib.contextmanager
def neutral_modes() -> Iterator[None]:
    """Whatever context the caller is in (inference mode, autocast, fake tensors), probe in a plain one."""
    with (
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
    ):
        yield


def own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own floating tensors, its children's left out: parameters, buffers, plain attributes."""
    for store in (module._parameters, module._buffers, module.__dict__):
        for name, tensor in store.items():
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                yield name, tensor


def plain_attributes(module: torch.nn.Module) -> dict[str, object]:
    """Attributes that hold plain values (numbers, strings, flags, tuples of them), the class's own ones included."""
    found = {}
    for cls in reversed(type(module).__mro__):
        if cls not in torch.nn.Module.__mro__:
            found.update((k, v) for k, v in vars(cls).items() if not k.startswith("__") and is_plain(v))
    found.update((k, v) for k, v in module.__dict__.items() if k not in MODULE_STATE and is_plain(v))
    return found


def is_plain(value) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value))


def first_input(cls: type) -> str | None:
    """Name of the forward's first parameter if it is the only one that must be given, else None."""
    try:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    except (TypeError, ValueError):  # a builtin or otherwise opaque callable has no signature
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    needed += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    return parameters[0].name if needed == [p.name for p in parameters[:1]] and parameters else None


def _copy(module: torch.nn.Module) -> torch.nn.Module:
    copied = object.__new__(type(module))
    torch.nn.Module.__init__(copied)
    copied.training = False
    memo = {id(module): copied}
    for name, value in module.__dict__.items():
        if name not in MODULE_STATE and name not in INSTANCE_FORWARDS:
            # What cannot be copied (locks, process groups, other modules) is left out: a forward that needs it fails.
            with contextlib.suppress(Exception):
                copied.__dict__[name] = _copy_value(value, memo)
    try:
        for name, tensor in module._parameters.items():
            value = None if tensor is None else _stand_in(tensor)
            copied._parameters[name] = value if value is None else Parameter(value, requires_grad=False)
        for name, tensor in module._buffers.items():
            copied._buffers[name] = None if tensor is None else _copy_value(tensor, memo)
    except Exception as error:  # tensor types of others may refuse in any way
        raise Unusable(f"its tensors cannot be copied: {type(error).__name__}: {error}") from error
    copied._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    return copied


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    shape = getattr(tensor, "ds_shape", tensor.shape)  # DeepSpeed ZeRO-3 keeps the true shape there
    return torch.ones(shape, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype)


def _copy_value(value, memo):
    inside = value if isinstance(value, (list, tuple, set)) else getattr(value, "__dict__", {}).values()
    if isinstance(value, torch.nn.Module) or any(isinstance(v, torch.nn.Module) for v in inside):
        raise TypeError("it holds another module outside its children")
    if isinstance(value, torch.Tensor):
        return torch.ones_like(value, device="cpu") if value.is_meta else value.detach().cpu().clone()
    return copy.deepcopy(value, memo)
