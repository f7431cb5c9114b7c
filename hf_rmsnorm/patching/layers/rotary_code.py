"""Which functions take every q and k through the same steps, as their source shows: what
one run proves of such a function holds for all.
"""

import ast
from collections.abc import Iterable
from types import FunctionType

import torch

from ..source import CannotRewrite, definition_of

# Functions of torch and methods of a tensor that it may call, and what it may read.
_CALLS = {
    "cat", "chunk", "contiguous", "flatten", "float", "mul", "narrow", "neg",
    "repeat_interleave", "reshape", "size", "split", "squeeze", "stack", "sum", "to",
    "transpose", "type_as", "unbind", "unflatten", "unsqueeze", "view",
}  # fmt: skip
_READS = {"dtype", "ndim", "shape"}
_NODES = (
    *(ast.Assign, ast.Expr, ast.Return, ast.expr_context),
    *(ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Starred, ast.keyword),
    *(ast.Subscript, ast.Slice, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop),
)


def functions_read(function: FunctionType) -> tuple | None:
    """The functions that a function calls by name, and those that these call, each as
    (namespace, name, function, code); None if its source shows more than arithmetic.
    """
    found: dict[FunctionType, tuple] = {}
    try:
        _read(function, found)
    except (CannotRewrite, _More):
        return None
    return tuple(found.values())


class _More(Exception):
    """A function does more than arithmetic."""


def _read(function: FunctionType, found: dict) -> None:
    if function.__closure__:
        raise _More
    for statement in definition_of(function.__code__).body:
        _check(statement, function, found)


def _check(node: ast.AST, function: FunctionType, found: dict) -> None:
    """Check a statement or an expression of a function, and all in it."""
    if isinstance(node, ast.Name):
        _check_name(node, function)
        return
    for part in _parts(node, function, found):
        _check(part, function, found)


def _check_name(node: ast.Name, function: FunctionType) -> None:
    is_local = node.id in function.__code__.co_varnames
    if not is_local and function.__globals__.get(node.id) is not torch:
        raise _More


def _parts(node: ast.AST, function: FunctionType, found: dict) -> Iterable[ast.AST]:
    """What is in a node of a kind that is allowed."""
    match node:
        case ast.If(ast.Compare(_, [ast.Is() | ast.IsNot()], [ast.Constant(None)])):
            return [node.test.left, *node.body, *node.orelse]
        case ast.Call(ast.Attribute(inner, name)) if name in _CALLS:
            return [inner, *node.args, *node.keywords]
        case ast.Call(ast.Name(name)):
            _read_called(name, function, found)
            return [*node.args, *node.keywords]
        case ast.Attribute(inner, name) if name in _READS or _is_of_torch(node):
            return [inner]
        case ast.keyword("out"):
            raise _More
    is_written = isinstance(getattr(node, "ctx", None), ast.Store)
    if not isinstance(node, _NODES) or (is_written and isinstance(node, ast.Subscript)):
        raise _More
    return ast.iter_child_nodes(node)


def _is_of_torch(node: ast.Attribute) -> bool:
    """Whether this names a dtype, as ``torch.float32``."""
    is_of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
    return is_of_torch and isinstance(getattr(torch, node.attr, None), torch.dtype)


def _read_called(name: str, function: FunctionType, found: dict) -> None:
    namespace = function.__globals__
    called = namespace.get(name)
    if type(called) is not FunctionType or name in function.__code__.co_varnames:
        raise _More
    if called not in found:
        found[called] = (namespace, name, called, called.__code__)
        _read(called, found)
