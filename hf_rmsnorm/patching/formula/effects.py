"""What a forward does besides computing its result, as far as its code and what that code can reach tell."""

import dis
import itertools
import random
import re
import time
import types
from collections.abc import Iterator

import numpy
import torch

MAX_ITEMS = 1000  # a longer list or table is data, and costs more to compare than it tells
PLAIN_TYPES = (bool, int, float, str, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, dict, set, bytearray)
_FUNCTIONS = (types.FunctionType, types.MethodType, staticmethod, classmethod, property)
_STORES = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL")
_HOOK = re.compile("register_.*hook")
_ALL_HELD = ("__dict__", "vars", "parameters", "named_parameters", "buffers", "named_buffers", "children", "modules")
_TELLING = {
    # What these say may differ from one call to the next, and nothing about the input or the module tells.
    **dict.fromkeys(("is_compiling", "is_dynamo_compiling"), "asks for whether it is compiled"),
    **dict.fromkeys(("is_exporting", "is_in_onnx_export"), "asks for whether it is exported"),
    **dict.fromkeys(("all_reduce", "all_gather"), "asks for what other processes hold"),
    **dict.fromkeys(("getenv", "environ"), "asks for the environment"),
    "is_tracing": "asks for whether it is traced",
    "get_default_dtype": "asks for the default dtype",
    "get_num_threads": "asks for the number of threads",
    "are_deterministic_algorithms_enabled": "asks for whether algorithms are deterministic",
    "get_rank": "asks for its rank",
    "get_world_size": "asks for the number of processes",
    # And what these do is no part of a result.
    **dict.fromkeys(("retain_grad", "requires_grad_"), "changes which tensors keep gradients"),
    **dict.fromkeys(("grad", "backward", "set_grad_enabled"), "reads or steers gradients"),
    **dict.fromkeys(("setattr", "delattr", "__setattr__", "globals"), "sets what has no fixed name"),
    **dict.fromkeys(("untyped_storage", "storage", "_typed_storage"), "looks at the memory of a tensor"),
    **dict.fromkeys(("_C", "DisableTorchFunction", "DisableTorchFunctionSubclass"), "reaches below torch's interface"),
    "print": "prints",
    **dict.fromkeys(("arange", "linspace", "cumsum", "bit_length"), "counts its rows"),
    **dict.fromkeys(_ALL_HELD, "goes through all that it holds, not by name"),
}


class Code:
    """A forward with the methods and functions of its own module that it calls, and every name that they use."""

    def __init__(self, forward, cls: type, instance: dict):
        self.functions: list[types.FunctionType] = []
        own = [c for c in cls.__mro__ if c not in torch.nn.Module.__mro__]
        self._members = [vars(c) for c in own]
        self._instance = instance
        self._modules = {getattr(forward, "__module__", None), *(c.__module__ for c in own)}
        self._add(forward)
        self._add_members(["__getattr__", "__getattribute__"])
        self._reached = [value for function in self.functions for value in _reached(function)]
        self.names = set().union(*map(_names, self.functions))
        constants = (c for function in self.functions for code in codes(function.__code__) for c in code.co_consts)
        # What `getattr` may be given, too.
        self.words = self.names.union(c for c in constants if isinstance(c, str) and c.isidentifier())

    def _add(self, function, wherever: bool = True) -> None:
        if not isinstance(function, _FUNCTIONS):
            return
        function = getattr(function, "_torchdynamo_orig_callable", function)
        function = getattr(function, "__func__", getattr(function, "fget", function))
        if not isinstance(function, types.FunctionType) or function in self.functions or len(self.functions) > 50:
            return
        module = str(function.__module__)
        if module not in self._modules and (not wherever or module.partition(".")[0] == "torch"):
            return
        self.functions.append(function)
        for inner in (getattr(function, "__wrapped__", None), *_cells(function)):
            self._add(inner)
        for value in _reached(function):
            self._add(value, wherever=False)
        self._add_members(_names(function))

    def _add_members(self, names: list[str]) -> None:
        for name, members in itertools.product(names, [*self._members, self._instance]):
            self._add(members.get(name), wherever=False)

    def faults(self) -> list[str]:
        """What this code does, or asks, that a fused forward would not, in words."""
        stored = [name for function in self.functions for name in _stores(function)]
        found = [f"its forward changes the module's own state or another object's: it sets {name!r}" for name in stored]
        found += [f"its forward {what}" for name, what in _TELLING.items() if name in self.names]
        if any(_HOOK.fullmatch(name) for name in self.names):
            found.append("its forward puts a hook on a gradient")
        reached = self._reached
        members = [scope[name] for scope in self._members for name in self.names & scope.keys()]
        tables = [c.values() if isinstance(c, dict) else c for c in self.containers() if isinstance(c, (dict, list))]
        if any(isinstance(value, torch.Tensor) for value in (*members, *reached, *itertools.chain(*tables))):
            found.append("its forward reads a tensor that is not its own")
        functions = [value for value in (*reached, *members, *self.functions) if isinstance(value, types.FunctionType)]
        if any(vars(function).keys() & self.words - {"__wrapped__"} for function in functions):
            found.append("its forward reads an attribute of a function")
        if any(value is random or value is time for value in reached):
            found.append("its forward asks for the clock, or for Python's random numbers")
        if any(value is numpy for value in reached) and self.names & {"prod", "array", "asarray", "product"}:
            found.append("its forward computes in NumPy")
        if any(isinstance(value, torch.jit.ScriptFunction) and "prim::If" in str(value.graph) for value in reached):
            found.append("a scripted function that it calls decides something, which cannot be watched")
        return list(dict.fromkeys(found))

    def containers(self) -> list:
        """Lists, tables and sets that outlive a call: globals, defaults, what a closure holds, the class's own."""
        held = [members.get(name) for members in self._members for name in self.names] + self._reached
        lasting = (v for v in held if _of_itertools(v) or (isinstance(v, _CONTAINERS) and len(v) <= MAX_ITEMS))
        return list({id(value): value for value in lasting}.values())


def contents(value, depth: int = 3):
    """A value to compare later: of lists, tables, sets and iterators what they hold, of anything else which it is."""
    kind = type(value)  # not what a stand-in says of itself
    if issubclass(kind, (list, tuple, dict)) and depth and len(value) <= MAX_ITEMS:
        if not issubclass(kind, dict):
            return [contents(v, depth - 1) for v in value]
        return [(k if isinstance(k, str) else id(k), contents(v, depth - 1)) for k, v in value.items()]
    if issubclass(kind, (set, frozenset, bytearray, list, dict)):
        return len(value)
    if isinstance(value, torch.Tensor):
        return id(value), None if value.is_inference() else value._version
    return repr(value) if isinstance(value, PLAIN_TYPES) or _of_itertools(value) else id(value)


def _of_itertools(value) -> bool:
    return type(value).__module__ == "itertools"


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Some code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


def _cells(function: types.FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet filled
            continue


def _names(function: types.FunctionType) -> list[str]:
    return list(dict.fromkeys(name for code in codes(function.__code__) for name in code.co_names))


def _reached(function: types.FunctionType) -> Iterator[object]:
    """What a function may use that it was not given: what its closure holds, defaults, and globals."""
    yield from (*_cells(function), *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from (function.__globals__.get(name) for name in _names(function))


def _stores(function: types.FunctionType) -> list[str]:
    """Names that a function, or one inside it, gives to something that outlives the call."""
    outer = set(function.__code__.co_freevars)
    steps = [step for code in codes(function.__code__) for step in dis.get_instructions(code)]
    return [i.argval for i in steps if i.opname in _STORES or (i.opname == "STORE_DEREF" and i.argval in outer)]
