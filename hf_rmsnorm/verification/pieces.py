"""The fused pieces of a layer: the functions that its rewritten forward calls in the
place of the model's operators, each as a call that can be made again by itself.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..fused.later import Later, later
from ..fused.modulated import OnePlusScale
from ..fused.norm import patch_of, recipe_of
from ..ops import use_backend
from ..patching.layers.calls import FUNCTIONS
from ..patching.source import CannotRewrite
from ..patching.swap import layer_part
from .calls import Call, unpatched
from .context import is_float


class FusedPiece(nn.Module):
    """A function that a fused layer calls, as a module of the patched norms that it
    gets.

    Args:
        arguments: the function's, by name; those that are named in a call replace them.
    """

    def __init__(self, function: Callable, arguments: dict):
        super().__init__()
        self.function = function
        self.arguments = arguments
        norms = []
        for value in arguments.values():
            norms.append(value.norm if isinstance(value, Later) else value)
        self.norms = nn.ModuleList(filter(recipe_of, norms))

    def forward(self, **tensors):
        arguments = {}
        for name, value in self.arguments.items():
            t = tensors.get(name, _tensor_of(value))
            if isinstance(value, Later):
                # with the weights of this call; an unpatched norm is called
                t = later(value.norm, t)
            elif isinstance(value, OnePlusScale):
                t = OnePlusScale(t)
            arguments[name] = t
        signature = inspect.signature(self.function)
        bound = inspect.BoundArguments(signature, arguments)
        return self.function(*bound.args, **bound.kwargs)


class PieceCall(Call):
    """A call of a `FusedPiece`; the arguments are the tensors that ask for gradients."""

    def name_of(self, place: int | str) -> str:
        return str(place)

    @contextmanager
    def original(self) -> Iterator[nn.Module]:
        """The same in the model's own operators, by the norms' own forwards; of a
        converted model, by the formula that its norms run.
        """
        own = [n for n in self.module.norms if not patch_of(n).replaces]
        with unpatched(*own), use_backend("reference"):
            yield self.module


def pieces_of(call: Call) -> list[PieceCall]:
    """The calls of fused pieces that a call of a layer makes, with gradients; none of
    another module, or of a layer whose forward others replaced.
    """
    module = call.module
    part = layer_part(type(module))
    if part is None or "forward" in vars(module):
        return []
    calls: list[PieceCall] = []
    functions = {}
    for name, function in FUNCTIONS.items():
        functions[name] = functools.partial(_record, calls, call.path, function)
    base = part.__base__
    try:
        forward = part._hf_rmsnorm_fusion.rewrite(base, functions)
    except CannotRewrite:  # its class has another forward now, which runs unfused
        return []
    parameters = {}
    for name, parameter in module.named_parameters():
        if is_float(parameter) and not parameter.is_meta:
            parameters[name] = parameter.detach().requires_grad_()
    x = call.x.detach().clone().requires_grad_()
    vars(module)["forward"] = types.MethodType(forward, module)
    try:
        with torch.enable_grad():
            call.again().outputs(module, {call.place: x}, parameters)
    finally:
        del vars(module)["forward"]
    return calls


def _record(calls: list[PieceCall], path: str, function: Callable, *args, **kwargs):
    """The result of a function in the layer at a path; its call is kept if the function
    returns new tensors.
    """
    returned = function(*args, **kwargs)
    arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    given = set(map(id, arguments.values()))
    for y in tree_leaves(returned):
        if not is_float(y) or id(y) in given:
            return returned
    tensors = _without_graph(arguments)
    if tensors:
        path = f"{path}, {function.__name__} {len(calls) + 1}"
        piece = FusedPiece(function, arguments)
        calls.append(PieceCall(path, piece, None, tensors, next(iter(tensors))))
    return returned


def _without_graph(arguments: dict) -> dict[str, torch.Tensor]:
    """The tensors that ask for gradients, by name; they are exchanged for copies that
    keep no graph.
    """
    tensors = {}
    for name, value in arguments.items():
        t = _tensor_of(value)
        if is_float(t) and t.requires_grad:
            tensors[name] = t = t.detach()
            if isinstance(value, Later):
                t = replace(value, x=t)
            elif isinstance(value, OnePlusScale):
                t = OnePlusScale(t)
            arguments[name] = t
    return tensors


def _tensor_of(value):
    """The tensor in an argument that prepares one; the argument itself otherwise."""
    if isinstance(value, Later):
        return value.x
    if isinstance(value, OnePlusScale):
        return value.value
    return value
