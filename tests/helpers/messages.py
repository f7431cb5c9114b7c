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
    """Every message of the package, as far as the source shows it."""
    trees = {}
    for path in sorted((ROOT / "hf_rmsnorm").rglob("*.py")):
        trees[path] = ast.parse(path.read_text(encoding="utf-8"))
    kinds = {*WARNERS, *_exceptions(trees.values())}
    found = []
    for path, tree in trees.items():
        name = path.relative_to(ROOT / "hf_rmsnorm").as_posix()
        of_module = _assigned(tree.body)
        for function, call in _calls(tree):
            kind = _name_of(call.func)
            if kind in kinds and call.args:
                names = of_module | _assigned(ast.walk(function))
                for text in _texts(call.args[0], names, depth=3):
                    words = " ".join(text.split())
                    found.append(Message(name, function.name, kind, words))
    return tuple(dict.fromkeys(found))


def _calls(tree: ast.Module):
    """(function, call) for each call; those of inner functions are their own."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    owners = {}  # inner functions come later
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                owners[node] = function
    return [(function, call) for call, function in owners.items()]


def _exceptions(trees) -> set[str]:
    """The names of all classes of exceptions, Python's and the package's."""
    names = {"ArgumentTypeError"}  # of argparse
    for name, value in vars(builtins).items():
        if isinstance(value, type) and issubclass(value, Exception):
            names.add(name)
    nodes = [node for tree in trees for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    for _ in range(3):  # subclasses of subclasses
        for node in classes:
            if names.intersection(map(_name_of, node.bases)):
                names.add(node.name)
    return names


def _name_of(node: ast.expr) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


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
    """What an expression can be."""
    match node:
        case ast.Constant():
            return [str(node.value)]
        case ast.FormattedValue():
            return _texts(node.value, names, depth)
        case ast.IfExp():
            return _texts(node.body, names, depth) + _texts(node.orelse, names, depth)
        case ast.Name() if node.id in names and depth:
            others = {name: names[name] for name in names if name != node.id}
            texts = [_texts(value, others, depth - 1) for value in names[node.id]]
            return [*itertools.chain(*texts)][:MOST]
        case ast.JoinedStr():
            parts = node.values
        case ast.BinOp(op=ast.Add()):
            parts = [node.left, node.right]
        case _:
            return [HOLE]
    choices = [_texts(part, names, depth) for part in parts]
    return ["".join(chosen) for chosen in itertools.product(*choices)][:MOST]
