"""Means that a model computes and no weight holds, taken off while it runs: a converted checkpoint records where.

A LayerNorm takes off any mean itself, so that the checkpoint computes the same where it is loaded without a patch.
"""

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from functools import lru_cache

import torch


def without_mean(x: torch.Tensor) -> torch.Tensor:
    """x minus its mean over the last dimension, computed in float32 or wider and rounded once to the dtype of x."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide - wide.mean(-1, keepdim=True)).to(x.dtype)


def _of_output(module, args, output):
    return (without_mean(output[0]), *output[1:]) if isinstance(output, tuple) else without_mean(output)


def _of_input(module, args, kwargs):
    if args:
        return (without_mean(args[0]), *args[1:]), kwargs
    name = input_name(type(module))
    return args, {**kwargs, name: without_mean(kwargs[name])}


@lru_cache(maxsize=256)
def input_name(cls: type) -> str:
    """What a module's forward calls its first argument, which callers may give by name; "" where it has none."""
    for forward in (base.__dict__["forward"] for base in cls.__mro__ if "forward" in base.__dict__):
        first = [*inspect.signature(forward).parameters.values()][1:2]
        if first and first[0].kind is first[0].POSITIONAL_OR_KEYWORD:  # a class that patches may pass on what it gets
            return first[0].name
    return ""


def centre_at(model: torch.nn.Module, centred: Mapping[str, str], undo: ExitStack) -> None:
    """Take the mean off what the modules at these paths are given first (``"input"``), or return first (``"output"``).

    Hooks do it that run before all others, so that they see what the model computes with. `undo` gets what removes
    those that were not there before.
    """
    for path, where in centred.items():
        if not _hooks(module := model.get_submodule(path)):
            if where == "input":
                module.register_forward_pre_hook(_of_input, prepend=True, with_kwargs=True)
            else:
                module.register_forward_hook(_of_output, prepend=True)
            undo.callback(uncentre, module)


def uncentre(module: torch.nn.Module) -> None:
    """Undo `centre_at` of one module."""
    for hooks, number in _hooks(module):
        del hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)


def _hooks(module: torch.nn.Module) -> list[tuple[dict, int]]:
    both = (module._forward_pre_hooks, module._forward_hooks)
    return [(hooks, number) for hooks in both for number, hook in hooks.items() if hook in (_of_input, _of_output)]
