"""Finds the rotary embedding of q and k without norms in the source of one forward, and
puts it in one launch.

    q, k = apply_rotary_pos_emb(q, k, cos, sin)

becomes

    q, k = rotate_together(self, apply_rotary_pos_emb, q, k, cos, sin)

The function is looked up by its name at each call: one that takes its place is called.
"""

import ast
import inspect
from types import FunctionType

from ...fused.attention import rotate_together
from ...fused.rotary import RotaryCall
from .calls import call
from .rotary_code import may_be_rotary


def may_rotate(cls: type) -> bool:
    """Whether a forward uses a Python function of its file by name. No source is read:
    every module of a model is asked.
    """
    forward = inspect.unwrap(getattr(cls, "forward", None))
    if type(forward) is not FunctionType:
        return False
    named = map(forward.__globals__.get, forward.__code__.co_names)
    return FunctionType in map(type, named)


def fuse_rotations(definition: ast.FunctionDef, cls: type, itself: str) -> list[str]:
    """Put each rotation of q and k in one launch; returns the functions that rotate.

    Args:
        definition: of the forward of a class; it is changed.
        itself: the forward's name for its module.
    """
    functions = inspect.unwrap(cls.forward).__globals__
    names = []
    for node in ast.walk(definition):
        match node:
            case ast.Assign(
                [ast.Tuple([ast.Name(q), ast.Name(k)])],
                ast.Call(
                    ast.Name(name), [ast.Name(of_q), ast.Name(of_k), _, _, *more]
                ) as rotated,
            ) if (q, k) == (of_q, of_k):
                called = _called(more, rotated.keywords)
                if called is None or not may_be_rotary(functions.get(name), called):
                    continue
                names.append(name)
                operands = itself, rotated.func, *rotated.args
                node.value = call(rotate_together, rotated, *operands)
                node.value.keywords = rotated.keywords
    return names


def _called(more: list[ast.expr], keywords: list[ast.keyword]) -> RotaryCall | None:
    """The integers that a rotary function gets besides; None if it gets other things."""
    try:
        values = tuple(map(ast.literal_eval, more))
        named = [(keyword.arg, ast.literal_eval(keyword.value)) for keyword in keywords]
    except ValueError:
        return None
    if not all(type(value) is int for value in (*values, *dict(named).values())):
        return None
    return RotaryCall(False, values, tuple(named))
