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


def fuse_rotations(definition: ast.FunctionDef, cls: type) -> list[str]:
    """Put each rotation of q and k in one launch; returns the functions that rotate.

    Args:
        definition: of the forward of a class; it is changed.
    """
    functions = inspect.unwrap(cls.forward).__globals__
    names = []
    for node in ast.walk(definition):
        match node:
            case ast.Assign(
                [ast.Tuple([ast.Name(q), ast.Name(k)])],
                ast.Call(
                    ast.Name(name), [ast.Name(of_q), ast.Name(of_k), _, _], keywords
                ) as rotated,
            ) if (q, k) == (of_q, of_k):
                called = _called(keywords)
                if called is None or not may_be_rotary(functions.get(name), called):
                    continue
                names.append(name)
                operands = "self", rotated.func, *rotated.args
                node.value = call(rotate_together, rotated, *operands)
                node.value.keywords = keywords
    return names


def _called(keywords: list[ast.keyword]) -> RotaryCall | None:
    """The constants that a rotary function gets by name; None if it gets other things."""
    named = []
    for keyword in keywords:
        if not isinstance(keyword.value, ast.Constant):
            return None
        named.append((keyword.arg, keyword.value.value))
    return RotaryCall(named=tuple(named))
