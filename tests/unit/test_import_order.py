"""The shape of the code, read from its sources: imports go down, in no circle, and none
hides inside a function.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "hf_rmsnorm"
# From the lowest: each imports what stands above it here, nothing of its own line.
# `hf_rmsnorm`: the public names.
LAYERS = (
    ("formula", "paths", "record", "demo"),
    ("reference", "kernels", "sources"),
    ("ops",),
    ("fused",),
    ("patching",),
    ("verification", "integrations"),
    ("conversion",),
    ("hf_rmsnorm",),
    ("cli",),
    ("__main__", "benchmarks"),
    ("scripts",),
)
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}
OPTIONAL = ("triton", "torch.distributed")  # not installed, or not built, everywhere
MOST_LINES = 550


@dataclass(frozen=True)
class Import:
    """One name that a file imports of this repository: the file that it leads to, and
    where it is written.
    """

    path: Path
    line: int
    target: Path
    name: str
    in_function: bool

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.target.relative_to(ROOT)} ({self.name})"


@cache
def files() -> dict[str, Path]:
    """Every file of the layers by its dotted name."""
    found = {}
    for path in sorted(
        p
        for folder in ("hf_rmsnorm", "benchmarks", "scripts")
        for p in (ROOT / folder).rglob("*.py")
    ):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def room(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return folder if folder != "hf_rmsnorm" else rest[0]


def imported(path: Path, tree: ast.AST):
    """(dotted name, line) of each name that is imported anywhere in a tree."""
    here = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            base += [node.module] if node.module else []
            yield from (
                (".".join([*base, alias.name]), node.lineno) for alias in node.names
            )


@cache
def imports(path: Path) -> list[Import]:
    tree, found = ast.parse(path.read_text()), []
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    inside = {each for function in functions for each in imported(path, function)}
    for name, line in imported(path, tree):
        module = name
        while module and module not in files():
            module = module.rpartition(".")[0]
        if module:
            rest = name.removeprefix(module).removeprefix(".")
            found.append(
                Import(path, line, files()[module], rest, (name, line) in inside)
            )
    return found


def every_import() -> list[Import]:
    return [each for path in files().values() for each in imports(path)]


@cache
def needs_what_may_be_missing(path: Path) -> bool:
    """Whether importing a file imports what is optional, by itself or by what it
    imports.
    """
    body = ast.parse(path.read_text()).body
    own = any(
        name.startswith(OPTIONAL)
        for node in body
        for name, _ in imported(path, ast.Module([node], []))
    )
    return own or any(
        needs_what_may_be_missing(each.target)
        for each in imports(path)
        if not each.in_function
    )


def test_the_documentation_has_the_same_layers():
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(
        r"^## Layers$.*?^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
    )[1]
    assert tuple(tuple(line.split(", ")) for line in block.splitlines()) == LAYERS


def test_every_file_has_its_layer():
    assert {room(path) for path in files().values()} <= HEIGHT.keys() | {"__init__"}


def test_imports_only_go_down():
    wrong = []
    for each in every_import():
        here, there = room(each.path), room(each.target)
        if there == "__init__":
            if each.name in ("", "__version__"):
                continue
            there = "hf_rmsnorm"
        if here == "__init__" or (here != there and HEIGHT[there] >= HEIGHT[here]):
            wrong.append(str(each))
    assert not wrong


def test_no_import_of_the_package_hides_in_a_function():
    wrong = [
        str(each)
        for each in every_import()
        if each.in_function and each.path.is_relative_to(PACKAGE)
        and not (room(each.path) == "cli" or needs_what_may_be_missing(each.target))
    ]  # fmt: skip
    assert not wrong
    calls = [
        path
        for path in PACKAGE.rglob("*.py")
        if re.search(r"import_module\(f?\W*\.", path.read_text())
    ]
    assert calls == [PACKAGE / "__init__.py"]


def test_no_files_import_each_other_in_a_circle():
    below = {path: {each.target for each in imports(path)} for path in files().values()}
    before = {}
    while before != below:
        # until each that is left imports one that is left, and is imported by one
        before, imported_by_others = below, set().union(*below.values())
        left = {path for path, targets in below.items() if targets} & imported_by_others
        below = {path: below[path] & left for path in left}
    assert not {
        str(path.relative_to(ROOT)): [str(t.relative_to(ROOT)) for t in below[path]]
        for path in below
    }


def test_no_two_classes_have_one_name():
    where: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in where.items() if len(paths) > 1}


def test_no_file_is_too_long():
    lengths = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    assert not {
        str(path): lines for path, lines in lengths.items() if lines > MOST_LINES
    }


def words_of(path: Path):
    """Identifiers and strings of a file, docstrings and comments left out."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "module"):
            if isinstance(getattr(node, field, None), str):
                yield getattr(node, field)
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            yield node.value


@pytest.mark.parametrize(
    "part", ["formula", "reference", "kernels", "ops", "fused", "patching"]
)
def test_no_model_is_named_in_the_code(part):
    # Short names ("opt", "sam") are letters of other words, and some are words.
    models = {name.replace("_", "") for name in CONFIG_MAPPING_NAMES}
    models = {
        name for name in models if len(name) >= 5 or name in ("gpt2", "phi3", "olmo")
    } - {"align"}
    paths = [
        path
        for path in files().values()
        if path.is_relative_to(PACKAGE) and room(path) == part
    ]
    assert paths
    for path in paths:
        for word in words_of(path):
            text = word.lower().replace("_", "")
            assert not [name for name in models if name in text], (
                f"{path.name}: {word!r}"
            )
