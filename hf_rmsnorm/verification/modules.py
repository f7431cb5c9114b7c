"""Which modules of two models may compute something else."""

from contextlib import ExitStack
from types import FunctionType, MethodType

import torch
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import align_module_device
from torch import nn

_ROWS = 4096  # of a parameter at a time between devices: bounds the memory a large vocabulary needs


def changed_modules(reference: nn.Module, candidate: nn.Module) -> list[str]:
    """Paths of the leaf modules that may compute something else; in doubt one counts: it is compared, not condemned."""
    others = dict(candidate.named_modules())
    leaves = ((path, m) for path, m in reference.named_modules() if next(m.children(), None) is None)
    return [path for path, module in leaves if path in others and _differ(module, others[path])]


_OF_MODULES = {*vars(nn.Module()), "forward", "_hf_hook", "_old_forward"}  # `training` is among them
_PLAIN = (bool, int, float, complex, str, tuple, list, torch.dtype, type(None))


def _differ(a: nn.Module, b: nn.Module) -> bool:
    def same(f, g) -> bool:
        """One function, or a method of both modules."""
        if isinstance(f, MethodType) and isinstance(g, MethodType) and f.__self__ is a and g.__self__ is b:
            f, g = f.__func__, g.__func__
        return f is g

    def same_attribute(v, w) -> bool:
        if isinstance(v, torch.Tensor) and isinstance(w, torch.Tensor):
            return _same_tensor(v, w)
        if isinstance(v, _PLAIN) or isinstance(w, _PLAIN):
            return type(v) is type(w) and v == w
        functions = isinstance(v, (FunctionType, MethodType)) or isinstance(w, (FunctionType, MethodType))
        return not functions or same(v, w)  # of a config, say, nobody knows what a forward reads from it

    def alike(ours: dict, theirs: dict, same_value) -> bool:
        return ours.keys() == theirs.keys() and all(same_value(v, theirs[k]) for k, v in ours.items())

    attributes = ({k: v for k, v in vars(m).items() if k not in _OF_MODULES} for m in (a, b))
    functions = (dict(enumerate(_functions(m))) for m in (a, b))
    if type(a) is not type(b) or not alike(*functions, same) or not alike(*attributes, same_attribute):
        return True
    with ExitStack() as stack:
        for module in (a, b):  # with the parameters that accelerate keeps elsewhere
            if any(p.is_meta for p in module.parameters()):
                stack.enter_context(align_module_device(module))
        return not (alike(a._parameters, b._parameters, _same_tensor) and alike(a._buffers, b._buffers, _same_tensor))


def _functions(module: nn.Module) -> list:
    """What runs: the forward, or what an accelerate hook calls as such, and all hooks but those that move tensors."""
    hook = vars(module).get("_hf_hook")
    forward = vars(module).get("_old_forward" if "_hf_hook" in vars(module) else "forward", module.forward)
    hooks = [h for h in getattr(hook, "hooks", (hook,)) if h is not None and type(h) is not AlignDevicesHook]
    return [forward, *module._forward_pre_hooks.values(), None, *module._forward_hooks.values(), None, *hooks]


def _same_tensor(v: torch.Tensor | None, w: torch.Tensor | None) -> bool:
    if v is None or w is None or v is w:
        return v is w
    if v.shape != w.shape or v.dtype != w.dtype or v.is_meta or w.is_meta:
        return False
    if v.device == w.device or v.dim() == 0:
        return torch.equal(v, w.to(v.device))
    return all(torch.equal(x, y.to(x.device)) for x, y in zip(v.split(_ROWS), w.split(_ROWS), strict=True))
