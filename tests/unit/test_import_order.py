"""The shape of the code, read from its sources: imports go down the list in
docs/architecture.md, in no circle, and none hides inside a function. A test stands where
its module does.
"""

import ast
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

import pytest
from places import ROOT
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

PACKAGE = ROOT / "hf_rmsnorm"
UNIT = ROOT / "tests" / "unit"
# of no one module: the shape of the code, and a promise of all kernels
OF_SEVERAL = "test_import_order.py", "kernels/test_batch_invariance.py"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# Each line of the list imports what stands above it, nothing of its own line.
LAYERS = PAGE.partition("## Layers")[2]
LAYERS = LAYERS.split("```")[1].removeprefix("text\n")
HEIGHT = {}
for height, line in enumerate(LAYERS.splitlines()):
    HEIGHT |= dict.fromkeys(line.split(", "), height)
HELPERS = ROOT / "tests" / "helpers"
OPTIONAL = ("triton", "torch.distributed")  # not installed, or not built, everywhere
MOST_LINES = 550
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Import(NamedTuple):
    """One name that a file imports, and the file of the layers that it leads to."""

    path: Path
    dotted: str
    in_function: bool
    target: Path | None

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)} imports {self.dotted}"


@cache
def files() -> dict[str, Path]:
    """Every file of the layers by its dotted name."""
    found = {}
    for folder in ("hf_rmsnorm", "benchmarks", "scripts", "tests/helpers"):
        start = HELPERS if folder == "tests/helpers" else ROOT
        for path in (ROOT / folder).rglob("*.py"):
            relative = path.relative_to(start).with_suffix("")
            name = ".".join(relative.parts)
            found[name.removesuffix(".__init__")] = path
    return found


def room(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    if folder != "hf_rmsnorm":
        return folder
    return rest[0]


def names_in(statement: ast.AST, package: str) -> list[str]:
    """The dotted names that a statement imports."""
    prefix = ""
    if isinstance(statement, ast.ImportFrom):
        relative = "." * statement.level + (statement.module or "")
        prefix = resolve_name(relative, package) + "."
    elif not isinstance(statement, ast.Import):
        return []
    return [prefix + alias.name for alias in statement.names]


def file_of(dotted: str) -> Path | None:
    while dotted and dotted not in files():
        dotted = dotted.rpartition(".")[0]
    return files().get(dotted)


@cache
def imports(path: Path) -> list[Import]:
    """All imports of a file, also those of other packages."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    found = []
    inside = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, FUNCTIONS):
            inside.update(ast.walk(node))
        for dotted in names_in(node, package):
            found.append(Import(path, dotted, node in inside, file_of(dotted)))
    return found


def inner_imports() -> list[Import]:
    """Those that lead to a file of the layers."""
    found = [each for path in files().values() for each in imports(path)]
    return [each for each in found if each.target is not None]


@cache
def needs_what_may_be_missing(path: Path) -> bool:
    """Whether a file imports what is optional, by itself or by what it imports."""
    for each in imports(path):
        if each.dotted.startswith(OPTIONAL):
            return True
        below = each.target
        if below and not each.in_function and needs_what_may_be_missing(below):
            return True
    return False


def test_every_file_has_its_layer():
    for path in files().values():
        assert room(path) in HEIGHT or room(path) == "__init__"


def is_downward(each: Import) -> bool:
    here = room(each.path)
    there = room(each.target)
    if there == "__init__":
        if each.dotted in ("hf_rmsnorm", "hf_rmsnorm.__version__"):
            return True
        there = "hf_rmsnorm"
    if here == "__init__":
        return False
    return here == there or HEIGHT[there] < HEIGHT[here]


def test_imports_only_go_down():
    for each in inner_imports():
        assert is_downward(each), str(each)


def test_no_import_of_the_package_hides_in_a_function():
    for each in inner_imports():
        if not each.in_function or not each.path.is_relative_to(PACKAGE):
            continue
        if room(each.path) != "cli":
            assert needs_what_may_be_missing(each.target), str(each)


def test_no_files_import_each_other_in_a_circle():
    below = {path: set() for path in files().values()}
    for each in inner_imports():
        below[each.path].add(each.target)
    TopologicalSorter(below).prepare()  # raises and names the circle


# Files that put a folder on the search path: one runs in a clone that is not installed,
# the other measures an example, which finds its neighbour by its folder.
INSERTS = {"scripts/convert_layernorm_to_rmsnorm.py", "scripts/minilm.py"}


def test_no_folder_is_put_on_the_search_path():
    """So that no import leads where the tests above do not look."""
    found = set()
    for path in files().values():
        if not path.is_relative_to(PACKAGE) and "sys.path" in path.read_text():
            found.add(path.relative_to(ROOT).as_posix())
    assert found == INSERTS


def test_no_file_is_too_long():
    for path in files().values():
        assert len(path.read_text().splitlines()) <= MOST_LINES, path


def test_a_unit_test_is_found_from_its_module():
    for path in UNIT.rglob("test_*.py"):
        place = path.relative_to(UNIT)
        if place.as_posix() in OF_SEVERAL:
            continue
        name = place.stem.removeprefix("test_") + "_"
        modules = (PACKAGE / place.parent).glob("*.py")
        found = [module for module in modules if name.startswith(f"{module.stem}_")]
        assert found, f"{place}: no module of hf_rmsnorm/{place.parent} begins its name"


def words_of(path: Path):
    """Identifiers and strings of a file, docstrings and comments left out."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS))
        if documented and ast.get_docstring(node) is not None:
            del node.body[0]
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "module", "value"):
            word = getattr(node, field, None)
            if isinstance(word, str):
                yield word.lower().replace("_", "")


def model_names():
    """Those of Transformers. Short ones ("opt", "sam") are letters of other words."""
    names = {name.replace("_", "") for name in CONFIG_MAPPING_NAMES}
    long = {name for name in names if len(name) >= 5}
    return long - {"align"} | {"gpt2", "phi3", "olmo"}


PARTS = "formula", "reference", "kernels", "ops", "fused", "patching"


@pytest.mark.parametrize("part", PARTS)
def test_no_model_is_named_in_the_code(part):
    models = model_names()
    for path in files().values():
        for word in words_of(path) if room(path) == part else ():
            assert not any(name in word for name in models), f"{path.name}: {word!r}"
