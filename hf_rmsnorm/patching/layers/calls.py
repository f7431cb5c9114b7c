"""The functions of `fused` that a rewritten forward calls, and their names in it."""

import ast
from collections.abc import Callable

from ...fused import attention, later, modulated, sums

_PREFIX = "_hf_rmsnorm_"
_CALLED = (
    sums.add_and_norm,
    sums.norm_of_sum,
    modulated.OnePlusScale,
    modulated.add_and_modulate,
    modulated.modulated,
    attention.norm_and_rotate,
    attention.norm_and_rotate_one,
    attention.rotate_together,
    later.later,
    later.later_in,
    later.computed,
)
FUNCTIONS = {_PREFIX + function.__name__: function for function in _CALLED}


def call(function: Callable, where: ast.AST, *arguments) -> ast.Call:
    """``function(*arguments)`` at the place of a node.

    Args:
        arguments: nodes, the names of variables, or None.
    """
    called = ast.Name(_PREFIX + function.__name__, ast.Load())
    nodes = list(map(_node, arguments))
    return ast.copy_location(ast.Call(called, nodes, []), where)


def _node(argument: ast.AST | str | None) -> ast.AST:
    if isinstance(argument, ast.AST):
        return argument
    if isinstance(argument, str):
        return ast.Name(argument, ast.Load())
    return ast.Constant(argument)


def is_modulated(node: ast.AST | None, or_later: bool = False) -> bool:
    """Whether this is a call of a modulated norm, or else of one that waits for a
    helper.
    """
    functions = [modulated.modulated]
    if or_later:
        functions.append(later.later_in)
    match node:
        case ast.Call(ast.Name(name)):
            return FUNCTIONS.get(name) in functions
    return False
