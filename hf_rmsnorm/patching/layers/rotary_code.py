"""Which functions take every q and k through the same steps, as their source shows: what
one run proves of such a function holds for all.
"""

import ast
from types import FunctionType

import torch

from ...fused.source import CannotRewrite, definition_of
from .statements import ARITHMETIC, VIEWS

# Functions of torch and methods of a tensor that it may call, and what it may read.
_CALLS = VIEWS | {
    "cat", "float", "mul", "neg", "repeat_interleave", "size", "stack", "sum",
}  # fmt: skip
_READS = {"dtype", "ndim", "shape"}
_NODES = (*ARITHMETIC, ast.Return, ast.cmpop)


def functions_read(function: FunctionType) -> tuple | None:
    """The functions that a function names, and those that these name, each as
    (namespace, name, function, code); None if its source shows more than arithmetic.
    """
    found: dict[FunctionType, tuple] = {}
    if _is_arithmetic(function, found):
        return tuple(found.values())
    return None


def _is_arithmetic(function: FunctionType, found: dict) -> bool:
    """Whether a function only computes; notes the functions that it names."""
    if function.__closure__:
        return False
    try:
        definition = definition_of(function.__code__)
    except CannotRewrite:
        return False
    for statement in definition.body:
        for node in ast.walk(statement):
            if not _is_allowed(node, function, found):
                return False
    return True


def _is_allowed(node: ast.AST, function: FunctionType, found: dict) -> bool:
    """Whether a statement or an expression of a function may stand there, if all in it
    may.
    """
    match node:
        case ast.Name(name):
            is_local = name in function.__code__.co_varnames
            return is_local or _is_known(name, function.__globals__, found)
        case ast.Attribute(ast.Name("torch"), name):
            is_dtype = isinstance(getattr(torch, name, None), torch.dtype)
            return is_dtype or name in _CALLS
        case ast.Attribute(_, name, ast.Load()):
            return name in _CALLS or name in _READS
        case ast.Call(ast.Name(name)):
            return name not in function.__code__.co_varnames
        case ast.Call(called):
            return isinstance(called, ast.Attribute)
        case ast.If(test):
            return isinstance(test, ast.Compare)
        case ast.Compare(_, [ast.Is() | ast.IsNot()], [ast.Constant(None)]):
            return True
        case ast.Subscript(ctx=ast.Store()) | ast.Attribute():
            return False
    return isinstance(node, _NODES)


def _is_known(name: str, namespace: dict, found: dict) -> bool:
    """Whether a name is torch's, or that of a function that only computes itself."""
    value = namespace.get(name)
    if type(value) is not FunctionType:
        return value is torch
    if value in found:
        return True
    found[value] = namespace, name, value, value.__code__
    return _is_arithmetic(value, found)
