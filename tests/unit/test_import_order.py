"""The layers of the package, read from its sources: imports only go down."""

import ast
from pathlib import Path

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import hf_rmsnorm

PACKAGE = Path(hf_rmsnorm.__file__).parent
# What each part may import besides itself.
CORE = {"formula", "reference", "kernels", "ops", "layers", "patching"}
ALLOWED = {
    "formula": set(),
    "reference": {"formula"},
    "invariant": {"formula"},
    "paths": set(),
    "kernels": {"formula"},
    "configuration": set(),
    "ops": {"configuration", "formula", "reference", "kernels"},
    "derived": set(),
    "rewrite": set(),
    "handover": set(),
    "layers": {"formula", "reference", "ops", "derived", "handover"},
    "fused_layers": {"ops", "layers", "derived", "handover", "rewrite"},
    "fused_attention": {"ops", "layers", "fused_layers", "rewrite"},
    "patching": {
        "formula", "reference", "ops", "derived", "layers", "fused_layers", "fused_attention", "handover", "rewrite",
        "invariant", "paths",
    },
    "integrations": CORE | {"invariant"},
    "verification": {"formula", "reference", "invariant"},
    "conversion": {"formula", "reference", "invariant", "paths", "verification"},
    "demo": set(),
    "bench": {"formula", "reference", "kernels", "ops", "fused_layers", "fused_attention"},
}
# These use what the package offers its users, from inside functions only: importing them loads nothing more.
FACADE_USERS = {"verification", "conversion", "bench", "cli", "integrations"}


def parts():
    return sorted(p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists())


def imports(path):
    """(part of the package, line, whether inside a function) for every import of the package in a file."""
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
    }
    here = ("hf_rmsnorm", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [base] if len(base) > 1 else [[*base, alias.name] for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == "hf_rmsnorm":
                yield name[1] if len(name) > 1 else "", node.lineno, id(node) in inside


@pytest.mark.parametrize("part", parts())
def test_imports_only_go_down(part):
    files = [PACKAGE / f"{part}.py"] if (PACKAGE / f"{part}.py").exists() else sorted((PACKAGE / part).rglob("*.py"))
    facade = set(hf_rmsnorm.__all__)
    wrong = []
    for path in files:
        for target, line, in_function in imports(path):
            fine = target in (part, "__version__") or part not in ALLOWED or target in ALLOWED[part]
            if target in facade - {"__version__"}:
                fine = part in FACADE_USERS and in_function
            if not fine:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {target}")
    assert not wrong


def test_every_part_has_its_place():
    assert set(parts()) <= {*ALLOWED, "cli", "__init__", "__main__"}


def words_of(path):
    """Identifiers and strings of a file, docstrings and comments left out."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "module"):
            if isinstance(getattr(node, field, None), str):
                yield getattr(node, field)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


@pytest.mark.parametrize("part", ["formula", "reference", "kernels", "ops", "layers", "patching"])
def test_no_model_is_named_in_the_code(part):
    # Short names ("opt", "sam") are letters of other words, and some are words.
    models = {name.replace("_", "") for name in CONFIG_MAPPING_NAMES}
    models = {name for name in models if len(name) >= 5 or name in ("gpt2", "phi3", "olmo")} - {"align"}
    files = [PACKAGE / f"{part}.py"] if (PACKAGE / f"{part}.py").exists() else sorted((PACKAGE / part).rglob("*.py"))
    assert files
    for path in files:
        for word in words_of(path):
            text = word.lower().replace("_", "")
            assert not [name for name in models if name in text], f"{path.name}: {word!r}"
