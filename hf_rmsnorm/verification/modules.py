"""Finds the modules that differ between two models."""

from contextlib import ExitStack

import torch
from accelerate.utils import align_module_device
from torch import nn

# of a parameter at a time between devices: bounds the memory a large vocabulary needs
_ROWS = 4096
# `training` is among them
_OF_MODULES = {*vars(nn.Module()), "forward", "_hf_hook", "_old_forward"}
_PLAIN = (bool, int, float, complex, str, tuple, list, torch.dtype, type(None))


def changed_modules(reference: nn.Module, candidate: nn.Module) -> list[str]:
    """Paths of the leaf modules whose class, forward, plain attributes, parameters,
    buffers or hooks differ.
    """
    others = dict(candidate.named_modules())
    changed = []
    for path, module in reference.named_modules():
        is_leaf = next(module.children(), None) is None
        if is_leaf and path in others and _differ(module, others[path]):
            changed.append(path)
    return changed


def _differ(a: nn.Module, b: nn.Module) -> bool:
    if type(a) is not type(b) or _code(a) != _code(b):
        return True
    return _attributes(a) != _attributes(b) or not _same_tensors(a, b)


def _code(module: nn.Module) -> tuple:
    """The functions of a module's forward and hooks, without the object that a method
    is bound to.
    """
    # accelerate keeps it there
    forward = vars(module).get("_old_forward", module.forward)
    hooks = (*module._forward_pre_hooks.values(), None, *module._forward_hooks.values())
    return tuple(
        getattr(function, "__func__", function) for function in (forward, *hooks)
    )


def _attributes(module: nn.Module) -> dict:
    """The attributes of plain values; whether a forward reads parts of a config, for
    example, is not known.
    """
    attributes = {
        name: value for name, value in vars(module).items() if name not in _OF_MODULES
    }
    return {
        name: value for name, value in attributes.items() if isinstance(value, _PLAIN)
    }


def _same_tensors(a: nn.Module, b: nn.Module) -> bool:
    """Whether parameters and buffers are equal, including those that accelerate has
    offloaded.
    """
    with ExitStack() as stack:
        for module in (a, b):
            if any(p.is_meta for p in module.parameters()):
                stack.enter_context(align_module_device(module))
        ours, theirs = (
            dict(module.named_parameters()) | dict(module.named_buffers())
            for module in (a, b)
        )
        return ours.keys() == theirs.keys() and all(
            _same_tensor(t, theirs[name]) for name, t in ours.items()
        )


def _same_tensor(v: torch.Tensor, w: torch.Tensor) -> bool:
    if v is w:
        return True
    if v.shape != w.shape or v.dtype != w.dtype or v.is_meta or w.is_meta:
        return False
    if v.device == w.device or v.dim() == 0:
        return torch.equal(v, w.to(v.device))
    return all(
        torch.equal(x, y.to(x.device))
        for x, y in zip(v.split(_ROWS), w.split(_ROWS), strict=True)
    )
