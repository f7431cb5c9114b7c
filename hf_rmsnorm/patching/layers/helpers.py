"""Functions that only scale and shift a norm's result, as Qwen-Image's block calls one.

    y, gate = self.scaled(self.norm(x), c)    ->    y, gate = self.scaled(later(x, self.norm, self.scaled), c)

`later` returns an object that computes the norm when the helper multiplies it.
"""

import ast
import inspect
from types import FunctionType

from ...fused.modulated import HELPERS
from ...fused.source import CannotRewrite, definition_of
from .statements import is_product, is_sum, only_computes

LATER = "_hf_rmsnorm_later"


def is_later(node: ast.AST) -> bool:
    """Whether this is a call of `later`, which a rewriting has put there."""
    match node:
        case ast.Call(ast.Name(name)):
            return name == LATER
    return False


def is_helper(node: ast.expr, cls: type, itself: str) -> bool:
    """Whether a function or method only scales and shifts its first argument; notes
    which of them shift.

    Args:
        node: what the forward calls.
        cls: the class of the forward.
        itself: the forward's name for its module.
    """
    skipped = 0
    match node:
        case ast.Attribute(ast.Name(owner), name) if owner == itself:
            function, skipped = inspect.getattr_static(cls, name, None), 1
        case ast.Name(name):
            function = inspect.unwrap(cls.forward).__globals__.get(name)
        case _:
            return False
    if not isinstance(function, FunctionType):
        return False
    try:
        definition = definition_of(function.__code__)
    except CannotRewrite:
        return False
    parameters = definition.args.args[skipped:]
    product = _only_product(definition, parameters[0].arg) if parameters else None
    if product is None or not all(map(_only_computes, definition.body)):
        return False
    sums = filter(is_sum, ast.walk(definition))
    HELPERS[function.__code__] = any(total.left is product for total in sums)
    return True


def _only_product(definition: ast.FunctionDef, name: str) -> ast.BinOp | None:
    """``name * factor``, if that is the only mention of a parameter."""
    names = [n for n in ast.walk(definition) if isinstance(n, ast.Name)]
    mentions = [n for n in names if n.id == name]
    products = filter(is_product, ast.walk(definition))
    return next((p for p in products if mentions == [p.left]), None)


def _only_computes(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(ast.Constant()):  # its docstring
            return True
        case ast.Return(ast.expr() as value):
            return only_computes(value, lambda call: None)
    return only_computes(statement, lambda call: None)
