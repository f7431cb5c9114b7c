"""Functions that only scale and shift a norm's result, as Qwen-Image's block calls one.

    y, gate = self.scaled(self.norm(x), c)    ->    y, gate = self.scaled(later(x, self.norm, self.scaled), c)

`later` returns an object that computes the norm when the helper multiplies it.
"""

import ast
import inspect
from types import FunctionType

from ...fused.modulated import HELPERS
from ..source import CannotRewrite, definition_of
from .statements import is_product, is_sum, names_in, only_computes


def note_helper(node: ast.expr, cls: type, itself: str) -> bool:
    """Whether the function or method that a forward calls only scales and shifts its
    first argument; then it is noted in `HELPERS`.

    Args:
        node: the callee in the forward.
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
    *body, last = definition.body
    parameters = definition.args.args[skipped:]
    if not parameters or not isinstance(last, ast.Return) or last.value is None:
        return False
    product = _only_product(definition, parameters[0].arg)
    for part in [*body, last.value]:
        if product is None or not only_computes(part):
            return False
    sums = filter(is_sum, ast.walk(definition))
    HELPERS[function.__code__] = any(total.left is product for total in sums)
    return True


def _only_product(definition: ast.FunctionDef, name: str) -> ast.AST | None:
    """``name * factor``, if that is the only mention of a parameter."""
    mentions = [mention for mention in names_in(definition) if mention.id == name]
    for node in ast.walk(definition):
        if is_product(node) and mentions == [node.left]:
            return node
    return None
