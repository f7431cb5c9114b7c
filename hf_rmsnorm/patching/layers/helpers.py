"""Functions that only scale and shift a norm's result, as Qwen-Image's block calls one.

    y, gate = self.scaled(self.norm(x), c)    ->    y, gate = self.scaled(later(x, self.norm, self.scaled), c)

`later` returns an object that computes the norm when the helper multiplies it.
"""

import ast
import inspect
from types import CodeType, FunctionType
from typing import NamedTuple

from ...fused.source import CannotRewrite, definition_of
from .statements import is_product, is_sum, names_in, only_computes


class Helper(NamedTuple):
    """A function that only scales and shifts its first argument.

    Args:
        shifts: it does both.
    """

    code: CodeType
    shifts: bool


def find_helper(node: ast.expr, cls: type, itself: str) -> Helper | None:
    """The function or method that a forward calls, if it only scales and shifts its
    first argument.

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
            return None
    if not isinstance(function, FunctionType):
        return None
    try:
        definition = definition_of(function.__code__)
    except CannotRewrite:
        return None
    *body, last = definition.body
    parameters = definition.args.args[skipped:]
    if not parameters or not isinstance(last, ast.Return) or last.value is None:
        return None
    product = _only_product(definition, parameters[0].arg)
    if product is None:
        return None
    for part in [*body, last.value]:
        if not only_computes(part, _calls_nothing):
            return None
    sums = filter(is_sum, ast.walk(definition))
    shifts = any(total.left is product for total in sums)
    return Helper(function.__code__, shifts)


def _calls_nothing(call: ast.Call) -> bool:
    return False


def _only_product(definition: ast.FunctionDef, name: str) -> ast.AST | None:
    """``name * factor``, if that is the only mention of a parameter."""
    mentions = []
    for mention in names_in(definition):
        if mention.id == name:
            mentions.append(mention)
    for node in ast.walk(definition):
        if is_product(node) and mentions == [node.left]:
            return node
    return None
