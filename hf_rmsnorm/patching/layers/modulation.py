"""Where a forward scales and shifts what a norm returned, as an adaptive LayerNorm does, found in its source.

So is the sum that such a norm reads, and the product, ``gate * x``, that nothing but this sum reads.
"""

import ast
import copy
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ...fused.modulated import modulated, modulated_sum, put_off
from ...fused.source import call, compiled_again, forward_source
from .values import JUMPS, PAST, Flow, hangs_hooks, is_seen

_MODULATED, _SUM, _PRODUCT = "_hf_rmsnorm_modulated", "_hf_rmsnorm_modulated_sum", "_hf_rmsnorm_put_off"
_AHEAD = "_hf_rmsnorm_ahead"
# What may be computed after the norm instead of before it, as nothing that it does can be seen.
_PURE = (ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Constant, ast.Tuple, ast.UnaryOp, ast.USub, ast.Load)
_VIEWS = {"unsqueeze", "squeeze", "view", "expand", "to"}
_JUMPS = *JUMPS, ast.With, ast.Match, ast.Yield, ast.YieldFrom


@dataclass(frozen=True)
class ModulationFusion:
    """The child norms of a module whose result its forward scales and shifts; `sums` are those that read its sums."""

    norms: tuple[str, ...]
    sums: tuple[str, ...] = ()

    def rewrite(self, base: type) -> Callable:
        """The forward of a class, with each norm and its modulation as one call."""

        def change(definition: ast.FunctionDef, itself: str) -> ast.FunctionDef:
            found = list(_modulations(definition, itself, set(self.norms)))
            totals, products = _sums(definition, itself, found)
            ahead = ast.Name(_AHEAD, ast.Load())
            for put, name, rows, scale, shift in found:
                put(call(_MODULATED, rows, itself, ahead, name, rows, scale, *([] if shift is None else [shift])))

            class Replace(ast.NodeTransformer):
                def visit_BinOp(self, node):
                    site = totals.get(node)
                    self.generic_visit(node)
                    if site is not None:
                        return call(_SUM, node, itself, ahead, node.left, node.right, *site)
                    return call(_PRODUCT, node, node.left, node.right) if node in products else node

            definition = Replace().visit(definition)
            empty = ast.Assign([ast.Name(_AHEAD, ast.Store())], ast.Dict([], []))
            first = 1 if ast.get_docstring(definition, clean=False) is not None else 0
            definition.body.insert(first, ast.copy_location(empty, definition.body[first]))
            return definition

        helpers = {_MODULATED: modulated, _SUM: modulated_sum, _PRODUCT: put_off}
        return compiled_again(base, change, helpers)

    def __str__(self) -> str:
        each = (f"{'+ ' * (norm in self.sums)}{norm} * (1 + scale) + shift" for norm in self.norms)
        return f"{', '.join(each)}{', each' if len(self.norms) > 1 else ''} in one launch"


def find_modulations(cls: type, norms: set[str]) -> ModulationFusion | None:
    """What a forward modulates of these children's results, or None; a `CannotRewrite` where it has no source."""
    function, definition = forward_source(cls)
    itself = next(iter(inspect.signature(function).parameters))
    found = list(_modulations(definition, itself, norms))
    if not found:
        return None
    names = tuple(dict.fromkeys(name for _, name, *_ in found))
    sums = {site.elts[0].value for site, _ in _sums(definition, itself, found)[0].values()}
    return ModulationFusion(names, tuple(name for name in names if name in sums))


def _sums(definition: ast.FunctionDef, itself: str, found: list[tuple]) -> tuple[dict, set]:
    """({each ``+`` that such a norm reads: the site and modulation of `modulated_sum`}, products that only they read).

    found: the `_modulations` of the forward.
    """
    flow, totals = Flow(definition, itself), {}
    norms = [name for _, name, *_ in found]
    hooks = hangs_hooks(definition)
    for _, name, rows, scale, shift in found:
        parts = [scale] if shift is None else [scale, shift]
        made = frozenset().union(*(flow.read.get(node, ()) for part in parts for node in ast.walk(part)))
        read = flow.read.get(rows, frozenset()) - flow.past
        sums = [node for node in read if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)]
        for total in sums if all(map(_is_of_variables, parts)) else ():
            # While gradients are asked for, a recomputation is to do the same: nothing is learnt of what is in vain.
            seen = hooks or len(sums) > 1 or made & flow.written.keys() or is_seen(definition, total, itself, norms)
            site = map(ast.Constant, (name, bool(seen), len(totals)))
            nothing = ast.arguments([], [], None, [], [], None, [])
            modulation = ast.Lambda(nothing, ast.Tuple(copy.deepcopy(parts), ast.Load()))
            totals.setdefault(total, (ast.Tuple([*site], ast.Load()), modulation))
    sides = [side for total in totals for side in (total.left, total.right)]
    return totals, {side for side in sides if _is_product(side)} | _put_off(definition, flow, totals)


def _put_off(definition: ast.FunctionDef, flow: Flow, totals: Iterable[ast.BinOp]) -> set[ast.BinOp]:
    """The products that are assigned to a variable which, as long as it holds them, only a sum right behind reads."""
    if any(isinstance(node, _JUMPS) for node in ast.walk(definition)):
        return set()
    inner = (n for n in ast.walk(definition) if isinstance(n, (ast.FunctionDef, ast.Lambda)) and n is not definition)
    later = {n.id for function in inner for n in ast.walk(function) if isinstance(n, ast.Name)}  # perhaps read
    given = (values for *_, each in flow.calls for _, values in each)
    elsewhere = frozenset().union(flow.shown, flow.written, flow.past, *given)
    found = set()
    for block in (b for n in ast.walk(definition) for _, b in ast.iter_fields(n) if isinstance(b, list)):
        for before, statement in itertools.pairwise(block):
            match statement:
                case ast.Assign([ast.Name()], ast.BinOp(ast.Name(), ast.Add(), ast.Name()) as total) if total in totals:
                    found |= {
                        product
                        for name, product in _made_last(before)
                        if name not in later and product not in elsewhere
                        and all(n in (total.left, total.right) for n, values in flow.read.items() if product in values)
                    }  # fmt: skip
    return found


def _made_last(statement: ast.stmt) -> Iterator[tuple[str, ast.BinOp]]:
    """(variable, product) of each that a statement may end with assigning."""
    match statement:
        case ast.Assign([ast.Name(name)], product) if _is_product(product):
            yield name, product
        case ast.If(_, body, orelse):
            for block in filter(None, (body, orelse)):
                yield from _made_last(block[-1])


def _is_product(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)


def _is_of_variables(node: ast.expr) -> bool:
    """Whether a pure expression asks no object for anything but views, so that it may be asked twice."""
    called = {id(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
    return not any(isinstance(n, ast.Attribute) and id(n) not in called for n in ast.walk(node))


def _modulations(definition: ast.FunctionDef, itself: str, norms: set[str]) -> Iterator[tuple]:
    """(what puts an expression in its place, the norm's name, its input, scale, shift or None) of each."""
    for node in ast.walk(definition):
        for field, value in ast.iter_fields(node):
            if isinstance(value, ast.expr) and (found := _parts(value)) and (of := _norm(found[0], itself, norms)):
                yield (lambda new, node=node, field=field: setattr(node, field, new)), *of, *found[1:]
            for at, each in enumerate(value if isinstance(value, list) else ()):
                if isinstance(each, ast.expr) and (found := _parts(each)) and (of := _norm(found[0], itself, norms)):
                    yield (lambda new, value=value, at=at: value.__setitem__(at, new)), *of, *found[1:]
                elif at and (pair := _in_two(value[at - 1], each, itself, norms)):
                    yield (lambda new, value=value, at=at: _merge(value, at, new)), *pair


def _in_two(first: ast.stmt, second: ast.stmt, itself: str, norms: set[str]) -> tuple | None:
    """The same of ``y = self.norm(x)`` and directly behind it ``y = y * (1 + scale) + shift``."""
    match first, second:
        case ast.Assign([ast.Name(name)], made), ast.Assign([ast.Name(again)], value) if name == again:
            found, of = _parts(value), _norm(made, itself, norms)
            if found and of and isinstance(found[0], ast.Name) and found[0].id == name:
                others = (n for part in found[1:] if part is not None for n in ast.walk(part))
                if not any(isinstance(n, ast.Name) and n.id == name for n in others):
                    return *of, *found[1:]
    return None


def _merge(body: list, at: int, new: ast.expr) -> None:
    body[at].value = new
    body[at - 1] = ast.copy_location(ast.Pass(), body[at - 1])


def _norm(node: ast.expr, itself: str, norms: set[str]) -> tuple[str, ast.expr] | None:
    match node:
        case ast.Call(ast.Attribute(ast.Name(owner), name), [rows], []) if owner == itself and name in norms:
            return None if isinstance(rows, ast.Starred) else (name, rows)
    return None


def _parts(node: ast.expr) -> tuple[ast.expr, ast.expr, ast.expr | None] | None:
    """(what is modulated, scale, shift or None) of ``y * (1 + scale) + shift`` in any order of factors."""
    shift = None
    match node:
        case ast.BinOp(ast.BinOp(_, ast.Mult(), _) as product, ast.Add(), shift) if _is_pure(shift):
            pass
        case ast.BinOp(shift, ast.Add(), ast.BinOp(_, ast.Mult(), _) as product) if _is_pure(shift):
            pass
        case ast.BinOp(_, ast.Mult(), _) as product:
            shift = None
        case _:
            return None
    for y, factor in ((product.left, product.right), (product.right, product.left)):
        in_order = _is_first(y, node) or all(map(_is_pure, getattr(y, "args", ())))
        if in_order and (scale := _scale(factor)) is not None and _is_pure(scale):
            return y, scale, shift
    return None


def _scale(factor: ast.expr) -> ast.expr | None:
    """The scale in ``1 + scale``, also where a view is made of that sum: then a view of the scale."""
    match factor:
        case ast.BinOp(ast.Constant(one), ast.Add(), scale) | ast.BinOp(scale, ast.Add(), ast.Constant(one)):
            return scale if one == 1 and type(one) in (int, float) else None
        case ast.Subscript(inner, index) if (scale := _scale(inner)) is not None:
            return ast.copy_location(ast.Subscript(scale, index, ast.Load()), factor)
        case ast.Call(ast.Attribute(inner, name), arguments, []) if (
            name in _VIEWS - {"to", "view"} and (scale := _scale(inner)) is not None
        ):
            return ast.copy_location(ast.Call(ast.Attribute(scale, name, ast.Load()), arguments, []), factor)
    return None


def _is_first(part: ast.expr, node: ast.expr) -> bool:
    """Whether a part of sums and products is what Python evaluates first of them."""
    while isinstance(node, ast.BinOp):
        node = node.left
    return part is node


def _is_pure(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in _VIEWS
            and not node.keywords
            and all(map(_is_pure, (node.func.value, *node.args)))
        )
    known = isinstance(node, _PURE) and getattr(node, "attr", "") not in PAST
    return known and all(map(_is_pure, ast.iter_child_nodes(node)))
