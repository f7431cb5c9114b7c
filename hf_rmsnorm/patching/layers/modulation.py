"""Scale and shift of a norm's result, as in an adaptive LayerNorm, found in the source
of one forward.

    y = self.norm(x) * (1 + scale[:, None]) + shift    ->    y = modulated(x, self.norm, scale[:, None], shift)

    y = self.norm(x)
    z = y * (1 + scale) + shift                        ->    z = modulated(x, self.norm, scale, shift)

    scale = 1 + scale
    y = self.norm(x) * scale                           ->    y = modulated(x, self.norm, Factor(scale))

The factors may have any order, and the shift may be missing. Scale and shift are
variables, or views of them, so it does not matter when they are computed. A function
that only scales and shifts its argument is read too (`helpers`).
"""

import ast
from collections.abc import Set
from typing import NamedTuple

from ...fused.source import call
from .helpers import is_later, move_into_call, put_off
from .order import gather_modulations
from .uses import blocks, is_read_later, reads

MODULATED = "_hf_rmsnorm_modulated"
FACTOR = "_hf_rmsnorm_factor"
_PURE = (
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Slice,
    ast.Constant,
    ast.Tuple,
    ast.UnaryOp,
    ast.USub,
    ast.Load,
)
_VIEWS = {"unsqueeze", "squeeze", "view", "expand", "to", "float", "index_select"}
# which give the same of 1 + scale and of scale
_VIEWS_OF_A_SUM = {"unsqueeze", "squeeze", "expand"}
_MEMORY = {"data", "numpy"}  # a write through these moves no version


class _Modulation(NamedTuple):
    """``normed * (1 + scale) + shift``, or ``normed * scale + shift`` where the scale
    is prepared.
    """

    normed: ast.expr
    scale: ast.expr
    shift: ast.expr | None


def mark_modulations(
    definition: ast.FunctionDef,
    cls: type,
    itself: str,
    norms: Set[str],
    shared: Set[str],
) -> list[str]:
    """Make one call of each norm and its modulation; returns the norms' names.

    Args:
        cls: whose forward this is.
        itself: the forward's name for its module.
        norms: the names of the children that may be computed with a modulation.
        shared: names that something besides the forward's own statements may read.
    """
    marks = _Marks(cls, itself, norms, shared, _prepared_factors(definition))
    marks.join_block(definition.body, [])
    marks.visit(definition)
    return [
        n.args[1].attr for n in ast.walk(definition) if is_modulated(n) or is_later(n)
    ]


def is_modulated(node: ast.AST) -> bool:
    """Whether this is a call that `mark_modulations` has put there."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == MODULATED
    )


class _Marks(ast.NodeTransformer):
    """Puts the calls in their places: of two statements first, then of one expression."""

    def __init__(
        self,
        cls: type,
        itself: str,
        norms: Set[str],
        shared: Set[str],
        factors: set[str],
    ):
        self.cls = cls
        self.itself = itself
        self.norms = norms
        self.shared = shared
        self.factors = factors

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        parts = self._modulation(node)
        if parts is None or not self._is_norm(parts.normed):
            return self.generic_visit(node)
        return self._call(parts.normed, parts)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        put_off(node, self._is_norm, self.cls, self.itself)
        return self.generic_visit(node)

    def join_block(self, body: list[ast.stmt], after: list[ast.stmt] | None) -> None:
        """Make one statement of each ``y = self.norm(x)`` and ``z = y * (1 + scale) +
        shift`` in a list.
        """
        for at, statement in enumerate(body):
            rest = None if after is None else body[at + 1 :] + after
            for block, follows in blocks(statement, rest):
                self.join_block(block, follows)
        gather_modulations(body, self._is_norm, self._reads_normed)
        for at in range(len(body) - 1, 0, -1):
            self._join(body, at, after)

    def _join(
        self, body: list[ast.stmt], at: int, after: list[ast.stmt] | None
    ) -> None:
        match body[at - 1], body[at]:
            case ast.Assign([ast.Name(name)], norm), ast.Assign([target], value) if (
                self._is_norm(norm)
            ):
                parts, result = self._modulation(value), getattr(target, "id", "")
            case _:
                return
        helper = move_into_call(body[at - 1], body[at])
        if helper is not None and not self._may_be_read(name, body[at + 1 :], after):
            given, helper.args[0] = helper.args[0], norm
            if put_off(helper, self._is_norm, self.cls, self.itself):
                del body[at - 1]
                return
            helper.args[0] = given
        if not result or parts is None or getattr(parts.normed, "id", "") != name:
            return
        others = (part for part in parts[1:] if part is not None)
        if any(reads(part, {name}) for part in others):
            return
        if result != name and self._may_be_read(name, body[at + 1 :], after):
            return
        body[at].value = self._call(norm, parts)
        del body[at - 1]

    def _may_be_read(
        self, name: str, rest: list[ast.stmt], after: list[ast.stmt] | None
    ) -> bool:
        return after is None or name in self.shared or is_read_later(name, rest + after)

    def _reads_normed(self, statement: ast.stmt) -> str | None:
        """The name that a statement modulates."""
        parts = (
            self._modulation(statement.value)
            if isinstance(statement, ast.Assign)
            else None
        )
        return None if parts is None else getattr(parts.normed, "id", None)

    def _is_norm(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(ast.Attribute(ast.Name(self.itself), name), [rows], []):
                return name in self.norms and not isinstance(rows, ast.Starred)
        return False

    def _call(self, norm: ast.Call, parts: _Modulation) -> ast.Call:
        shift = [] if parts.shift is None else [parts.shift]
        return call(MODULATED, norm, norm.args[0], norm.func, parts.scale, *shift)

    def _modulation(self, node: ast.expr) -> _Modulation | None:
        """The parts of ``y * (1 + scale) + shift`` in any order; None of anything else."""
        product, shift = node, None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            product, shift = node.left, node.right
            if not is_product(product):
                product, shift = shift, product
            if not _is_pure(shift):
                return None
        if not is_product(product):
            return None
        for normed, factor in (
            (product.left, product.right),
            (product.right, product.left),
        ):
            scale = self._scale(factor)
            # Computing the norm's input may change the scale: then the order decides.
            in_order = _is_first(normed, node) or all(
                map(_is_pure, getattr(normed, "args", ()))
            )
            if scale is not None and in_order:
                return _Modulation(normed, scale, shift)
        return None

    def _scale(self, factor: ast.expr) -> ast.expr | None:
        """The scale in ``1 + scale``, or a name that holds this sum; None of another
        factor.
        """
        if isinstance(factor, ast.Name) and factor.id in self.factors:
            return call(FACTOR, factor, factor)
        scale = _scale_in_sum(factor)
        return scale if scale is not None and _is_pure(scale) else None


def _prepared_factors(definition: ast.FunctionDef) -> set[str]:
    """The names to which a forward assigns ``1 + scale``."""
    names = set()
    for statement in ast.walk(definition):
        match statement:
            case ast.Assign([ast.Tuple(targets)], ast.Tuple(values)) if len(
                targets
            ) == len(values):
                pairs = zip(targets, values, strict=True)
            case ast.Assign([target], value):
                pairs = [(target, value)]
            case _:
                continue
        names.update(
            t.id
            for t, v in pairs
            if isinstance(t, ast.Name) and _scale_in_sum(v) is not None
        )
    return names


def _is_first(part: ast.expr, node: ast.expr) -> bool:
    """Whether a part of sums and products is what Python evaluates first of them."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return part is node


def is_product(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def _scale_in_sum(factor: ast.expr) -> ast.expr | None:
    """The scale in ``1 + scale``; where a view is made of that sum, a view of the
    scale.
    """
    match factor:
        case ast.BinOp(ast.Constant(1), ast.Add(), scale) | ast.BinOp(
            scale, ast.Add(), ast.Constant(1)
        ):
            return scale
        case ast.Subscript(inner, index):
            scale = _scale_in_sum(inner)
            return (
                None
                if scale is None
                else ast.copy_location(ast.Subscript(scale, index, ast.Load()), factor)
            )
        case ast.Call(ast.Attribute(inner, name), arguments, []) if (
            name in _VIEWS_OF_A_SUM
        ):
            scale = _scale_in_sum(inner)
            if scale is None:
                return None
            return ast.copy_location(
                ast.Call(ast.Attribute(scale, name, ast.Load()), arguments, []), factor
            )
    return None


def _is_pure(node: ast.AST) -> bool:
    """Whether an expression is a variable, or a view or a cast of one."""
    match node:
        case ast.Call(ast.Attribute(inner, name), arguments, []):
            return name in _VIEWS and all(map(_is_pure, (inner, *arguments)))
        case ast.Attribute(_, name) if name in _MEMORY:
            return False
    return isinstance(node, _PURE) and all(map(_is_pure, ast.iter_child_nodes(node)))
