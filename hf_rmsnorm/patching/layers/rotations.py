"""The rotary embedding of q and k that no norm stands in front of, found in the source
of one forward, and put in one launch.

    q, k = apply_rotary_pos_emb(q, k, cos, sin)

becomes

    q, k = rotate_together(self, apply_rotary_pos_emb, q, k, cos, sin)

The function is looked up by its name at each call: one that takes its place is called.
"""

import ast
import inspect
from types import FunctionType

from ...fused.attention import rotate_together
from .calls import call
from .rotary import is_rotary


def may_rotate(cls: type) -> bool:
    """Whether a forward names a function that could take q, k and two tables. No source
    is read: every module of a model is asked.
    """
    forward = inspect.unwrap(getattr(cls, "forward", None))
    if type(forward) is not FunctionType:
        return False
    for name in forward.__code__.co_names:
        function = forward.__globals__.get(name)
        if type(function) is FunctionType and function.__code__.co_argcount >= 4:
            return True
    return False


def fuse_rotations(definition: ast.FunctionDef, cls: type, itself: str) -> list[str]:
    """Put each rotation of q and k in one launch; returns the functions that rotate.

    Args:
        definition: of the forward of a class; it is changed.
        itself: the forward's name for its module.
    """
    functions = inspect.unwrap(cls.forward).__globals__
    names = []
    for node in ast.walk(definition):
        rotated = _rotated(node)
        if rotated is None or not is_rotary(functions.get(rotated.func.id)):
            continue
        names.append(rotated.func.id)
        operands = itself, rotated.func, *rotated.args
        node.value = call(rotate_together, rotated, *operands)
    return names


def _rotated(node: ast.AST) -> ast.Call | None:
    """The call in ``q, k = f(q, k, cos, sin)``."""
    match node:
        case ast.Assign(
            [ast.Tuple([ast.Name(q), ast.Name(k)])],
            ast.Call(ast.Name(), [ast.Name(of_q), ast.Name(of_k), *tables], []) as made,
        ) if (q, k) == (of_q, of_k) and len(tables) == 2:
            if not any(isinstance(table, ast.Starred) for table in tables):
                return made
    return None
