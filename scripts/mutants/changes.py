"""The mutants of a file: each one change of its source."""

from __future__ import annotations

import ast
import copy
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KNOWN = Path(__file__).with_name("known.json")
KEYS = ("key", "keys", "like", "dtypes", "strides", "table", "tables", "versions", "alike")
MAKERS = ("launch_key", "qk_launch_key", "_operands", "state")  # functions that return keys
TAKERS = ("remember", "bind")  # and that are given some
TURNED = {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
          ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
DROPPED = "dropped"


@dataclass(frozen=True)
class Mutant:
    """One change of one file: in `code`, the text of a line, `before` became `after`, or is gone."""

    path: str
    line: int
    code: str
    before: str
    after: str

    @property
    def name(self) -> str:
        """What it is called whatever else the file holds, as in known.json."""
        return f"{self.path.removeprefix('hf_rmsnorm/')} | {self.code} | {self.before} -> {self.after}"


def changes(tree: ast.Module):
    """(node, what stands in its place, the part of it that is gone or None) of each mutant."""
    said = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    keys = {id(each): each for node in ast.walk(tree) for each in _keys(node)}
    for node in ast.walk(tree):
        if id(node) in said:  # a message
            continue
        tests = [node.test] if isinstance(node, (ast.If, ast.IfExp, ast.While)) else getattr(node, "ifs", ())
        for test in tests:
            yield test, ast.UnaryOp(ast.Not(), test), None
        if isinstance(node, ast.BoolOp):
            for at, part in enumerate(node.values):
                rest = node.values[:at] + node.values[at + 1 :]
                yield node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest), part
        elif isinstance(node, ast.Compare):
            for at, op in enumerate(node.ops):
                turned = [*node.ops[:at], TURNED[type(op)](), *node.ops[at + 1 :]]
                yield node, ast.Compare(node.left, turned, node.comparators), None
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            off = node.value * 2 if type(node.value) is float and node.value else node.value + 1
            yield node, ast.Constant(off), None
        elif id(node) in keys:
            for at, part in enumerate(node.elts):
                yield node, ast.Tuple(node.elts[:at] + node.elts[at + 1 :], ast.Load()), part


def _keys(node: ast.AST):
    """The tuples of a statement that say what a thing depends on."""
    found: list = []
    if isinstance(node, (ast.Assign, ast.AugAssign)):
        target = node.target if isinstance(node, ast.AugAssign) else node.targets[0]
        if getattr(target, "id", None) in KEYS:
            found = [node.value, getattr(node.value, "elt", None), getattr(node.value, "orelse", None)]
    elif isinstance(node, ast.FunctionDef) and node.name in MAKERS:
        found = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in TAKERS:
        found = node.args
    return [each for each in found if isinstance(each, ast.Tuple) and len(each.elts) > 1]


def mutants_of(path: str) -> list[tuple[Mutant, str]]:
    """Every mutant of a file, with the source of the whole file."""
    whole = (ROOT / path).read_bytes()
    lines = whole.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def span(node):
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text_of(node):
        first, last = span(node)
        return " ".join(whole[first:last].decode().split())

    found = []
    for node, instead, gone in changes(ast.parse(whole)):
        first, last = span(node)
        after = f"({ast.unparse(ast.fix_missing_locations(copy.deepcopy(instead)))})"
        text = (whole[:first] + after.encode() + whole[last:]).decode()
        at = node if gone is None else gone
        after = DROPPED if gone is not None else "not so" if isinstance(instead, ast.UnaryOp) else after[1:-1]
        code = lines[at.lineno - 1].decode().strip()
        found.append((Mutant(path, at.lineno, code, text_of(at), after), text))
    return found


@cache
def known() -> dict[str, str]:
    """Why a mutant that no test notices changes no result, by its name."""
    reasons = json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.exists() else {}
    return {name: reason for reason, names in reasons.items() for name in names}
