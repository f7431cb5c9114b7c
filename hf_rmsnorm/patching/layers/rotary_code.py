"""Which functions are rotary embeddings that launches may compute: those that compute
along the last dimension alone, as their source shows, and rotate.

This function takes each head of each token through the same steps, whatever its
values are and however many there are: it calls nothing that moves or counts other
dimensions, cuts the last one alone, and keeps nothing between calls. So what one run
shows holds for any number of them.
"""

import ast
from collections.abc import Callable, Iterable
from types import FunctionType, NoneType

import torch

from ...fused.rotary import (
    PAIR,
    RotaryCall,
    RotaryCase,
    RotaryProof,
    probe,
    rotary_proofs,
)
from ..arithmetic import CAST, CUT, JOIN, words_that
from ..source import CannotRewrite, definition_of

_HEAD_DIM = 64
# Functions of torch and methods of a tensor: those that leave each element at its place,
# in the same dtype under autocast, and those that have to name the last dimension.
_BY_ELEMENT = words_that(CAST) | {"mul", "neg", "unsqueeze"}
_ALONG_LAST = words_that(JOIN, CUT)
_KEYWORDS = {"dim", "dtype"}
_NODES = (
    *(ast.Assign, ast.Expr, ast.Return, ast.expr_context, ast.Constant),
    *(ast.Tuple, ast.List, ast.BinOp, ast.UnaryOp, ast.USub),
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv),
)
# of defaults, which nothing can change
_CONSTANTS = int, float, str, bool, NoneType, torch.dtype


def may_be_rotary(function: Callable | None, called: RotaryCall = PAIR) -> bool:
    """Whether a function that is called so rotates in bfloat16 as launches do, with
    tables of all columns or of half of them.

    Its `RotaryProof` is noted for the calls: each finds out by it whether the function
    rotates such tensors.
    """
    if type(function) is not FunctionType:
        return False
    proof = rotary_proofs.get(function)
    if proof is None or not proof.still_holds():
        proof = read(function)
        if proof is None:
            return False
        rotary_proofs[function] = proof
    dtypes = torch.bfloat16, torch.bfloat16
    for columns in (_HEAD_DIM, _HEAD_DIM // 2):
        case = RotaryCase(called, _HEAD_DIM, columns, *dtypes, torch.device("cpu"))
        if probe(proof, function, case) is not None:
            return True
    return False


class _More(Exception):
    """A function does more than compute along the last dimension."""


def read(function: FunctionType) -> RotaryProof | None:
    """The proof that the source of a function gives, before any run; None if it has
    more than arithmetic along the last dimension.
    """
    reader = _Reader()
    try:
        reader.read(function)
    except (CannotRewrite, _More):
        return None
    return RotaryProof(tuple(reader.names.values()), tuple(reader.functions.values()))


class _Reader:
    """Reads a function, and those that it calls."""

    def __init__(self):
        self.names: dict[tuple, tuple] = {}
        self.functions: dict[FunctionType, tuple] = {}

    def read(self, function: FunctionType) -> None:
        if function in self.functions:
            return
        code = function.__code__
        defaults = function.__defaults__
        if function.__closure__ or code.co_kwonlyargcount:
            raise _More
        for value in defaults or ():
            if type(value) not in _CONSTANTS:
                raise _More
        self.functions[function] = function, code, defaults
        for statement in definition_of(code).body:
            self.check(statement, function)

    def check(self, node: ast.AST, function: FunctionType) -> None:
        """Check a statement or an expression of a function, and all in it."""
        if not isinstance(node, ast.Name):
            for part in self.parts(node, function):
                self.check(part, function)
            return
        is_local = node.id in function.__code__.co_varnames
        if not is_local and self.global_of(node.id, function) is not torch:
            raise _More

    def global_of(self, name: str, function: FunctionType) -> object:
        """The value of a global, which has to stay."""
        namespace = function.__globals__
        value = namespace.get(name)
        self.names[id(namespace), name] = namespace, name, value
        return value

    def parts(self, node: ast.AST, function: FunctionType) -> Iterable[ast.AST]:
        """The inner nodes of a node of an allowed kind."""
        match node:
            case ast.If(ast.Compare(x, [ast.Is() | ast.IsNot()], [ast.Constant(None)])):
                return [x, *node.body, *node.orelse]
            case ast.Call(ast.Name(name)) if name not in function.__code__.co_varnames:
                called = self.global_of(name, function)
                if type(called) is not FunctionType:
                    raise _More
                self.read(called)
                return _arguments(node)
            case ast.Call(ast.Attribute(inner)) if _keeps_others(node):
                return [inner, *_arguments(node)]
            case ast.Attribute(inner, "dtype"):
                return [inner]
            case ast.Subscript(inner, index, ast.Load()):
                return _parts_of_index(inner, index)
        if isinstance(node, _NODES):
            return ast.iter_child_nodes(node)
        raise _More


def _arguments(called: ast.Call) -> list[ast.expr]:
    return [*called.args, *(keyword.value for keyword in called.keywords)]


def _keeps_others(called: ast.Call) -> bool:
    """Whether this calls what leaves all dimensions but the last to themselves."""
    keywords = {keyword.arg: keyword.value for keyword in called.keywords}
    if not keywords.keys() <= _KEYWORDS:
        return False
    match called.func:
        case ast.Attribute(_, name) if name in _BY_ELEMENT:
            return True
        case ast.Attribute(_, name) if name in _ALONG_LAST:
            last = keywords.get("dim", called.args[-1] if called.args else None)
            return _is_minus(1, last)
        case ast.Attribute(ast.Call(ast.Attribute(_, "stack")), "flatten"):
            return len(called.args) == 1 and _is_minus(2, called.args[0])
    return False


def _is_minus(number: int, node: ast.AST | None) -> bool:
    match node:
        case ast.UnaryOp(ast.USub(), ast.Constant(value)):
            return value == number
    return False


def _parts_of_index(inner: ast.expr, index: ast.expr) -> list[ast.expr]:
    """The inner nodes of ``x.shape[-1]``; of a slice of the last dimension, ``x[...,
    a:b]``; or of an index that adds dimensions of one, ``x[:, None, :]``.
    """
    match inner, index:
        case ast.Attribute(x, "shape"), _ if _is_minus(1, index):
            return [x]
        case _, ast.Tuple([ast.Constant(value), ast.Slice() as cut]) if value is ...:
            return [inner, *ast.iter_child_nodes(cut)]
        case _, ast.Tuple(indices) if {*map(ast.unparse, indices)} <= {":", "None"}:
            return [inner]
    raise _More
