"""Modules with a norm of its own for each head, as `StableLmLayerNormPerHead`, found in the source of their forward."""

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ...fused.attention import norms_of_heads
from ...fused.norm import fusible_recipe
from ...fused.source import call, compiled_again, forward_source

_HEADS = "_hf_rmsnorm_norms_of_heads"


@dataclass(frozen=True)
class HeadsFusion:
    """The row of norms of which the one normalises the first head, the next the second, and so on."""

    row: str

    def rewrite(self, base: type) -> Callable:
        """The forward of a class, which computes all of them in one launch where that is the same."""

        def change(definition: ast.FunctionDef, itself: str) -> ast.FunctionDef:
            *_, last = definition.body
            rows = ast.Name(definition.args.args[1].arg, ast.Load())
            made = ast.NamedExpr(ast.Name(_HEADS + "_made", ast.Store()), call(_HEADS, last, itself, self.row, rows))
            there = ast.Compare(made, [ast.IsNot()], [ast.Constant(None)])
            same = ast.If(there, [ast.Return(ast.Name(made.target.id, ast.Load()))], [])
            definition.body.insert(0, ast.copy_location(same, definition.body[0]))
            return definition

        return compiled_again(base, change, {_HEADS: norms_of_heads})

    def __str__(self) -> str:
        return f"all {self.row} in one launch"


def find_heads(module: nn.Module, cls: type) -> HeadsFusion | None:
    """Its row of norms where a forward splits its input by heads and joins what each norm returns of one, else None.

    cls: the class without what was fused before.
    """
    rows = [name for name, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child)]
    if len(module._modules) != 1 or len(rows) != 1:
        return None
    if any(fusible_recipe(norm) is None for norm in module._modules[rows[0]]):
        return None
    function, definition = forward_source(cls)
    names = list(inspect.signature(function).parameters)
    if len(names) != 2 or function.__globals__.get("torch") is not torch:
        return None
    itself, given = map(re.escape, names)
    split = rf"(?:torch\.split\({given}, 1, dim=1\)|{given}\.split\(1, dim=1\))"
    each = rf"(\w+)\((\w+)\) for \(?\2, \3\)? in zip\({itself}\.{re.escape(rows[0])}, \1\)"
    documented = isinstance(definition.body[0], ast.Expr) and isinstance(definition.body[0].value, ast.Constant)
    text = "\n".join(map(ast.unparse, definition.body[documented:]))
    found = re.fullmatch(rf"(\w+) = {split}\nreturn torch\.cat\(\[{each}\], dim=1\)", text)
    return HeadsFusion(rows[0]) if found else None
