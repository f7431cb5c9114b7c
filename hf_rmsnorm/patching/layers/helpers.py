"""Functions that only scale and shift a norm's result, as Qwen-Image's block calls one.

    y, gate = self.scaled(self.norm(x), ...)    ->    y, gate = self.scaled(later(x, self.norm, self.scaled), ...)

`later` returns an object that computes the norm with the scale and shift when the
helper multiplies it.
"""

import ast
import inspect
from types import FunctionType

from ...fused.modulated import HELPERS
from ...fused.source import CannotRewrite, call, definition_of
from .order import IsNorm, computes

LATER = "_hf_rmsnorm_later"


def is_later(node: ast.AST) -> bool:
    """Whether this is a call that `put_off` has put there."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == LATER
    )


def put_off(node: ast.Call, is_norm: IsNorm, cls: type, itself: str) -> bool:
    """Put off a norm that is the first argument of a helper; returns whether this was
    done.
    """
    if not (node.args and is_norm(node.args[0])):
        return False
    function, skipped = _function(node.func, cls, itself)
    if function is None or not _register(function, skipped):
        return False
    norm = node.args[0]
    node.args[0] = call(LATER, norm, norm.args[0], norm.func, node.func)
    return True


def move_into_call(norm: ast.Assign, statement: ast.stmt) -> ast.Call | None:
    """The call in a statement whose first argument is the norm's result, if the
    statement mentions it only there.
    """
    (target,) = norm.targets
    named = [
        n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == target.id
    ]
    calls = (
        n
        for n in ast.walk(statement)
        if isinstance(n, ast.Call) and n.args and n.args[0] in named
    )
    return next(calls, None) if len(named) == 1 else None


def _function(
    node: ast.expr, cls: type, itself: str
) -> tuple[FunctionType | None, int]:
    """(the function that a call means, how many parameters come before its first
    argument).
    """
    match node:
        case ast.Attribute(ast.Name(owner), name) if owner == itself:
            function, skipped = inspect.getattr_static(cls, name, None), 1
        case ast.Name(name):
            function, skipped = inspect.unwrap(cls.forward).__globals__.get(name), 0
        case _:
            return None, 0
    return (function, skipped) if isinstance(function, FunctionType) else (None, 0)


def _register(function: FunctionType, skipped: int) -> bool:
    """Note whether a helper shifts; False of a function that is none."""
    try:
        definition = definition_of(function.__code__)
    except CannotRewrite:
        return False
    parameters = definition.args.args[skipped:]
    product = _only_product(definition, parameters[0].arg) if parameters else None
    if product is None or not all(map(_only_computes, definition.body)):
        return False
    sums = (
        n
        for n in ast.walk(definition)
        if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Add)
    )
    HELPERS[function.__code__] = any(total.left is product for total in sums)
    return True


def _only_product(definition: ast.FunctionDef, name: str) -> ast.BinOp | None:
    """``name * factor``, if that is the only mention of a parameter."""
    named = [
        n for n in ast.walk(definition) if isinstance(n, ast.Name) and n.id == name
    ]
    if len(named) != 1:
        return None
    products = (
        n
        for n in ast.walk(definition)
        if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)
    )
    return next((product for product in products if product.left is named[0]), None)


def _only_computes(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(ast.Constant()):  # its docstring
            return True
        case ast.Return(ast.expr() as value):
            statement = ast.Assign([ast.Name("returned", ast.Store())], value)
    return computes(statement, lambda _: False)
