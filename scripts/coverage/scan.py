"""Norm classes in the source of the installed Transformers, found without importing a
model.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

MODELS = Path(importlib.util.find_spec("transformers").origin).parent / "models"


def norm_classes(folder: Path = MODELS) -> dict[str, list[str]]:
    """Every class with "norm" in its name and a forward, its own or one that a class of
    that file gives it.

    Returns:
        By class name: the classes of its file that make or extend it (none where
            nothing there does), each given as
        ``<file>:<class>``.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "orm" not in text:
            continue
        classes = {
            node.name: node
            for node in ast.parse(text).body
            if isinstance(node, ast.ClassDef)
        }
        norms = [name for name in classes if _is_norm(name, classes)]
        if not norms:
            continue
        used = {name: _names(node) for name, node in classes.items()}
        for norm in norms:
            users = [
                f"{path.stem}:{name}"
                for name in classes
                if name != norm and norm in used[name]
            ]
            found[norm] = found.get(norm, []) + users
    return found


def _is_norm(name: str, classes: dict[str, ast.ClassDef]) -> bool:
    node = classes[name]
    return (
        "norm" in name.lower() and not _is_model(node) and _has_forward(node, classes)
    )


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _is_model(node: ast.ClassDef) -> bool:
    """Whole models, RobertaPreLayerNormForMaskedLM say, hold norms and are none."""
    return any(
        isinstance(base, ast.Name) and base.id.endswith("PreTrainedModel")
        for base in node.bases
    )


def _has_forward(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    if any(
        isinstance(item, ast.FunctionDef) and item.name == "forward"
        for item in node.body
    ):
        return True
    bases = [
        base.id
        for base in node.bases
        if isinstance(base, ast.Name) and base.id in classes
    ]
    return any(_has_forward(classes[base], classes) for base in bases)


def seen_classes(document: dict) -> set[str]:
    """The classes that a JSON of `patch` names: swapped, left alone, or no norms."""
    runs = [
        run
        for part in document["mappings"].values()
        for t in part["types"]
        for run in t["runs"]
    ]
    return {
        entry[0]
        for run in runs
        for key in ("swapped", "left_alone", "not_norms")
        for entry in run[key]
    }


def not_built(document: dict) -> dict[str, str]:
    """The norm classes that no model of the table holds, each with the reason as far as
    the source tells it.
    """
    classes, seen = norm_classes(), seen_classes(document)
    unbuilt = {
        t["type"].replace("-", "_"): t["error"]
        for part in document["mappings"].values()
        for t in part["types"]
        if not t["built"]
    }
    reasons = {}
    for name in sorted(classes.keys() - seen):
        users = sorted(classes[name])
        files = {user.partition(":")[0].removeprefix("modeling_") for user in users}
        blocked = sorted(unbuilt[f] for f in files & unbuilt.keys())
        if not users:
            reasons[name] = "no class of its file uses it"
        elif blocked:
            reasons[name] = f"its model is not built: {blocked[0]}"
        else:
            made = ", ".join(user.partition(":")[2] for user in users)
            reasons[name] = (
                f"made by {made}, which no type of the two mappings builds with it"
            )
    return reasons
