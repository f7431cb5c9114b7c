"""Which modules of two models may compute something else."""

from contextlib import ExitStack
from types import FunctionType, MethodType

import torch
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import align_module_device
from torch import nn

_ROWS = 4096  # of a parameter at a time between devices: bounds the memory a large vocabulary needs


_OF_MODULES = {*vars(nn.Module()), "forward", "_hf_hook", "_old_forward"}  # `training` is among them
_PLAIN = (bool, int, float, complex, str, tuple, list, torch.dtype, type(None))


def changed_modules(reference: nn.Module, candidate: nn.Module) -> list[str]:
    """Paths of the leaf modules that may compute something else; in doubt one counts: it is compared, not condemned."""
    others = dict(candidate.named_modules())
    changed = []
    for path, module in reference.named_modules():
        is_leaf = next(module.children(), None) is None
        if is_leaf and path in others and _differ(module, others[path]):
            changed.append(path)
    return changed


def _differ(a: nn.Module, b: nn.Module) -> bool:
    return type(a) is not type(b) or not (_same_code(a, b) and _same_attributes(a, b) and _same_tensors(a, b))


def _same_code(a: nn.Module, b: nn.Module) -> bool:
    """Whether the same functions run: equal ones, or the same method of both modules."""
    ours, theirs = _functions(a), _functions(b)
    return len(ours) == len(theirs) and all(_same_function(f, g, a, b) for f, g in zip(ours, theirs, strict=True))


def _same_function(f, g, a: nn.Module, b: nn.Module) -> bool:
    if isinstance(f, MethodType) and isinstance(g, MethodType) and f.__self__ is a and g.__self__ is b:
        return f.__func__ is g.__func__
    return f is g


def _functions(module: nn.Module) -> list:
    """What runs: the forward, or what an accelerate hook calls as such, and all hooks but those that move tensors."""
    state = vars(module)
    forward = state.get("_old_forward" if "_hf_hook" in state else "forward", module.forward)
    hook = state.get("_hf_hook")
    hooks = [h for h in getattr(hook, "hooks", (hook,)) if h is not None and type(h) is not AlignDevicesHook]
    return [forward, *module._forward_pre_hooks.values(), None, *module._forward_hooks.values(), None, *hooks]


def _same_attributes(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = ({k: v for k, v in vars(m).items() if k not in _OF_MODULES} for m in (a, b))
    return ours.keys() == theirs.keys() and all(_same_attribute(v, theirs[k], a, b) for k, v in ours.items())


def _same_attribute(v, w, a: nn.Module, b: nn.Module) -> bool:
    if isinstance(v, torch.Tensor) and isinstance(w, torch.Tensor):
        return _same_tensor(v, w)
    if isinstance(v, _PLAIN) or isinstance(w, _PLAIN):
        return type(v) is type(w) and v == w
    if isinstance(v, (FunctionType, MethodType)) or isinstance(w, (FunctionType, MethodType)):
        return _same_function(v, w, a, b)
    return True  # a config, say: which parts of it a forward reads is not known


def _same_tensors(a: nn.Module, b: nn.Module) -> bool:
    """Whether parameters and buffers are equal, those that accelerate keeps elsewhere included."""
    with ExitStack() as stack:
        for module in (a, b):
            if any(p.is_meta for p in module.parameters()):
                stack.enter_context(align_module_device(module))
        stores = (a._parameters, b._parameters), (a._buffers, b._buffers)
        for ours, theirs in stores:
            if ours.keys() != theirs.keys():
                return False
            if not all(_same_tensor(t, theirs[name]) for name, t in ours.items()):
                return False
    return True


def _same_tensor(v: torch.Tensor | None, w: torch.Tensor | None) -> bool:
    if v is None or w is None or v is w:
        return v is w
    if v.shape != w.shape or v.dtype != w.dtype or v.is_meta or w.is_meta:
        return False
    if v.device == w.device or v.dim() == 0:
        return torch.equal(v, w.to(v.device))
    return all(torch.equal(x, y.to(x.device)) for x, y in zip(v.split(_ROWS), w.split(_ROWS), strict=True))
