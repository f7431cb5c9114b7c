"""Code that a call of a norm runs besides the forward of its class: hooks, and forwards
that other code has set on the instance.
"""

import functools
from types import FunctionType, MethodType

import torch
from accelerate.hooks import AlignDevicesHook
from torch import is_grad_enabled
from torch.nn import Module
from torch.nn.modules.module import _has_any_global_hook

# Modules and functions: Python 3.10 does not tell in which class a function stands.
_ACCELERATE = "accelerate.hooks", "new_forward"
_TENSOR_PARALLEL = "transformers.distributed.tensor_parallel", "tp_forward"
# A variable of the one of these that sums the gradient of a norm's weight over the
# ranks. With gradients its first call registers a hook of that gradient; else it does
# nothing.
_HOOKED = "is_already_hooked"


def why_called(norm: Module) -> str:
    """Why a norm has to be called as a module: the code besides the forward of its
    class that may change its input or output; "" if there is none.
    """
    if (
        norm._forward_pre_hooks
        or norm._forward_hooks
        or norm._backward_hooks
        or norm._backward_pre_hooks
    ):
        return "the norm has a hook, which sees what the norm is called with"
    forward = norm.__dict__.get("forward")
    if forward is not None:
        wrapper = _wrapper(norm, forward)
        if wrapper:
            return f"the norm's forward is wrapped by {wrapper}"
    if "parametrizations" in norm._modules:
        return "the norm's weight is parametrized: a call computes it"
    if _has_any_global_hook():
        return "torch has a hook on every module"
    return ""


def _wrapper(norm: Module, forward) -> str:
    """The first wrapper of a forward on the instance that is more than a call of the
    class's forward, by its name; "" if there is none.
    """
    own = MethodType(type(norm).forward, norm)
    while forward != own:
        origin = _origin(forward)
        if origin == _ACCELERATE and forward.args == (norm,):
            acting = _acting(norm._hf_hook, norm)
            if acting:
                return acting
            forward = norm._old_forward
        elif origin == _TENSOR_PARALLEL and _HOOKED in forward.__code__.co_freevars:
            if is_grad_enabled() and _registers(forward, norm):
                name = name_of(forward)
                return f"{name}, which is to hook the gradient of its weight"
            forward = _variable(forward, "original_forward")
        else:
            return name_of(forward)
    return ""


def _registers(wrapper: FunctionType, norm: Module) -> bool:
    """Whether the next call of tensor parallelism's wrapper registers a hook."""
    hooked = _variable(wrapper, _HOOKED)
    for name, parameter in norm.named_parameters(recurse=False):
        if parameter.requires_grad and hooked.get(name) is not parameter:
            return True
    return False


def _acting(hook, norm: Module) -> str:
    """The name of accelerate's hook, and that it may change a norm's input or output, or
    loads its weight; "" of one that only keeps the input where the weight is, as a model
    over several GPUs has.
    """
    name = _class_name(hook)
    if type(hook) is not AlignDevicesHook:
        return name
    if hook.offload:
        return f"{name}, which loads its weight for each call"
    if not _is_on(norm, hook.execution_device):
        return f"{name}, which moves its input"
    return ""


def _is_on(norm: Module, device) -> bool:
    """Whether a norm's parameters are on a device. Then values computed ahead with them
    are there too: no kernel takes tensors of two devices. A norm without parameters may
    be given an input from anywhere.
    """
    parameters = list(norm.parameters(recurse=False))
    if device is None or not parameters:
        return False
    device = torch.device(device)
    for parameter in parameters:
        is_there = device.index in (None, parameter.device.index)
        if not is_there or parameter.device.type != device.type:
            return False
    return True


def name_of(forward) -> str:
    """The name of what runs first where a forward is called, and not of what that
    wraps.
    """
    function = _function_of(forward)
    if not isinstance(function, FunctionType):
        return _class_name(function)
    module, name = _origin(forward)
    qualified = getattr(function.__code__, "co_qualname", name)  # not in Python 3.10
    return f"{module}.{qualified}"


def _origin(forward) -> tuple[str, str]:
    """The module and the name of the function that runs first. `functools.wraps` gives
    it other names, those of the wrapped function.
    """
    function = _function_of(forward)
    if not isinstance(function, FunctionType):
        return "", ""
    return function.__globals__["__name__"], function.__code__.co_name


def _function_of(forward):
    """The function that a partial or a bound method calls."""
    function = forward
    if isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _class_name(instance) -> str:
    return f"{type(instance).__module__}.{type(instance).__qualname__}"


def _variable(function: FunctionType, name: str):
    """The value of a variable that a function has from the function around it."""
    at = function.__code__.co_freevars.index(name)
    return function.__closure__[at].cell_contents
