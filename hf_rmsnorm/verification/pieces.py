"""The fused pieces of a layer: the functions that its rewritten forward calls in the
place of the model's operators, each as a call that can be made again by itself.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..fused.attention import Waiting, waiting
from ..fused.modulated import OnePlusScale
from ..fused.norm import recipe_of
from ..ops import use_backend
from ..patching.layers.calls import FUNCTIONS
from ..patching.layers.layer_class import layer_part
from ..patching.source import CannotRewrite
from .calls import Call, unpatched
from .context import is_float


class Piece(nn.Module):
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
            norms += value.norms if isinstance(value, Waiting) else [value]
        self.norms = nn.ModuleList(filter(_is_patched, norms))

    def forward(self, **tensors):
        arguments = {}
        for name, value in self.arguments.items():
            if isinstance(value, Waiting):
                # with the weights of this call; unpatched norms are called one by one
                value = waiting(*value.norms) or value
            elif isinstance(value, OnePlusScale):
                value = OnePlusScale(tensors.get(name, value.value))
            else:
                value = tensors.get(name, value)
            arguments[name] = value
        signature = inspect.signature(self.function)
        bound = inspect.BoundArguments(signature, arguments)
        return self.function(*bound.args, **bound.kwargs)


class PieceCall(Call):
    """A call of a `Piece`; the arguments are the tensors that ask for gradients."""

    def name_of(self, place: int | str) -> str:
        return str(place)

    @contextmanager
    def original(self) -> Iterator[nn.Module]:
        """The same in the model's own operators, by the norms' own forwards."""
        with unpatched(*self.module.norms), use_backend("reference"):
            yield self.module


def _is_patched(value) -> bool:
    return isinstance(value, nn.Module) and recipe_of(value) is not None


def pieces_of(call: Call) -> list[PieceCall]:
    """The calls of fused pieces that a call of a layer makes, with gradients; none of
    another module, or of a layer whose forward others replaced.
    """
    module = call.module
    part = layer_part(type(module))
    if part is None or "forward" in vars(module):
        return []
    made = []
    functions = {
        name: _recorded(function, call.path, made)
        for name, function in FUNCTIONS.items()
    }
    try:
        forward = part._hf_rmsnorm_fusion.rewrite(
            part._hf_rmsnorm_layer_base, functions
        )
    except CannotRewrite:  # its class has another forward now, which runs unfused
        return []
    parameters = {
        name: parameter.detach().requires_grad_()
        for name, parameter in module.named_parameters()
        if is_float(parameter) and not parameter.is_meta
    }
    x = call.x.detach().clone().requires_grad_()
    vars(module)["forward"] = types.MethodType(forward, module)
    try:
        with torch.enable_grad():
            call.again().outputs(module, {call.place: x}, parameters)
    finally:
        del vars(module)["forward"]
    return made


def _recorded(function: Callable, path: str, made: list[PieceCall]) -> Callable:
    """The function, whose calls are added to a list where they return new tensors."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def record(*args, **kwargs):
        returned = function(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        given = set(map(id, arguments.values()))
        results = tree_leaves(returned)
        is_computed = all(is_float(y) and id(y) not in given for y in results)
        tensors = _without_graph(arguments)
        if tensors and is_computed:
            what = f"{path}, {function.__name__} {len(made) + 1}"
            piece = Piece(function, arguments)
            made.append(PieceCall(what, piece, None, tensors, next(iter(tensors))))
        return returned

    return record


def _without_graph(arguments: dict) -> dict[str, torch.Tensor]:
    """The tensors that ask for gradients, by name; they are exchanged for copies that
    keep no graph.
    """
    tensors = {}
    for name, value in arguments.items():
        is_prepared = isinstance(value, OnePlusScale)
        tensor = value.value if is_prepared else value
        if is_float(tensor) and tensor.requires_grad:
            tensors[name] = tensor.detach()
            arguments[name] = tensors[name]
            if is_prepared:
                arguments[name] = OnePlusScale(tensors[name])
    return tensors
