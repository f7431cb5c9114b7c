"""The errors and warnings of the package, read from its source: what each says, with
`HOLE` for what a call fills in.
"""

import ast
import builtins
import itertools
from dataclasses import dataclass
from functools import cache

from places import ROOT

HOLE = "\0"
WARNERS = ("warn", "warning")
MOST = 12  # alternatives of one message


@dataclass(frozen=True)
class Message:
    """One of the texts that an error or a warning can have."""

    path: str
    function: str
    kind: str
    text: str

    def __str__(self) -> str:
        text = self.text.replace(HOLE, "...")
        return f"{self.path}, {self.function}: {self.kind}({text})"


@cache
def messages() -> tuple[Message, ...]:
    """Every message of the package."""
    trees = {}
    for path in sorted((ROOT / "hf_rmsnorm").rglob("*.py")):
        trees[path] = ast.parse(path.read_text(encoding="utf-8"))
    kinds = {*WARNERS, *_exceptions(trees.values())}
    found = []
    for path, tree in trees.items():
        name = path.relative_to(ROOT / "hf_rmsnorm").as_posix()
        reader = _Reader(tree)
        for function, call in reader.calls():
            kind = _name_of(call.func)
            if kind in kinds and call.args:
                for text in reader.texts(call.args[0], function):
                    words = " ".join(text.split())
                    found.append(Message(name, function.name, kind, words))
    return tuple(dict.fromkeys(found))


def _exceptions(trees) -> set[str]:
    """The names of all classes of exceptions, Python's and the package's."""
    names = {"ArgumentTypeError"}  # of argparse
    for name, value in vars(builtins).items():
        if isinstance(value, type) and issubclass(value, Exception):
            names.add(name)
    classes = []
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.append(node)
    for _ in range(3):  # subclasses of subclasses
        for node in classes:
            if names.intersection(map(_name_of, node.bases)):
                names.add(node.name)
    return names


def _name_of(node: ast.expr) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


class _Reader:
    """Reads the texts of one file."""

    def __init__(self, tree: ast.Module):
        self._module = _assigned(tree.body)
        self._functions = []
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                self._functions.append(node)

    def calls(self):
        """(function, call) for each call; those of inner functions are their own."""
        seen = set()
        for function in reversed(self._functions):  # inner ones come later
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and id(node) not in seen:
                    seen.add(id(node))
                    yield function, node

    def texts(self, node: ast.expr, function: ast.FunctionDef) -> list[str]:
        """What an expression can be, as far as the source shows it."""
        names = dict(self._module)
        for name, values in _assigned(ast.walk(function)).items():
            names[name] = values
        return _texts(node, names, depth=3)[:MOST]


def _assigned(nodes) -> dict[str, list[ast.expr]]:
    values = {}
    for node in nodes:
        targets = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.NamedExpr):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                values.setdefault(target.id, []).append(node.value)
    return values


def _texts(node: ast.expr, names: dict, depth: int) -> list[str]:
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.FormattedValue):
        return _texts(node.value, names, depth)
    if isinstance(node, ast.IfExp):
        return _texts(node.body, names, depth) + _texts(node.orelse, names, depth)
    if isinstance(node, ast.Name) and node.id in names and depth:
        others = {name: names[name] for name in names if name != node.id}
        texts = []
        for value in names[node.id]:
            texts += _texts(value, others, depth - 1)
        return texts
    choices = [_texts(part, names, depth) for part in _parts(node)]
    if not choices:
        return [HOLE]
    return ["".join(chosen) for chosen in itertools.product(*choices)][:MOST]


def _parts(node: ast.expr) -> list[ast.expr]:
    """What a text is made of; nothing where it is computed otherwise."""
    if isinstance(node, ast.JoinedStr):
        return node.values
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [node.left, node.right]
    return []
