"""Functions that only scale and shift a norm's result, as Qwen-Image's block calls one.

    y, gate = self.scaled(self.norm(x), c)    ->    y, gate = self.scaled(later_in(self.scaled, self.norm, x), c)

`later_in` returns an object that computes the norm when the helper adds the shift.
"""

import ast
import inspect
from types import FunctionType

from ...fused.later import HELPERS
from ..source import CannotRewrite, definition_of
from .statements import names_in, only_computes


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
    if not _is_only_scaled_and_shifted(parameters[0].arg, definition):
        return False
    if not all(map(only_computes, [*body, last.value])):
        return False
    HELPERS.add(function.__code__)
    return True


def _is_only_scaled_and_shifted(name: str, definition: ast.FunctionDef) -> bool:
    """Whether ``name * factor + shift`` is the only mention of a parameter."""
    mentions = [mention for mention in names_in(definition) if mention.id == name]
    for node in ast.walk(definition):
        match node:
            case ast.BinOp(ast.BinOp(x, ast.Mult()), ast.Add()) if mentions == [x]:
                return True
    return False
