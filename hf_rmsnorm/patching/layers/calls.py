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
    name = ast.Name(_PREFIX + function.__name__, ast.Load())
    nodes = list(map(_node, arguments))
    return ast.copy_location(ast.Call(name, nodes, []), where)


def _node(argument: ast.AST | str | None) -> ast.AST:
    if isinstance(argument, ast.AST):
        return argument
    if isinstance(argument, str):
        return ast.Name(argument, ast.Load())
    return ast.Constant(argument)


def called(node: ast.AST | None) -> Callable | None:
    """The function of `FUNCTIONS` that a node calls; None of any other node."""
    match node:
        case ast.Call(ast.Name(name)):
            return FUNCTIONS.get(name)
    return None
