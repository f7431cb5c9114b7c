"""Why a patch does not report a class or a module with "norm" in its name: classes in
the source of the installed Transformers that no model of the table holds, and modules
that are no norms.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import torch

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


# torch's own, by what their statistics are taken over; a subclass computes the same
# where it keeps the forward.
TORCH = (
    (
        torch.nn.modules.instancenorm._InstanceNorm,
        "normalises each channel over all places",
    ),
    (torch.nn.modules.batchnorm._NormBase, "normalises over the batch"),
    (torch.nn.GroupNorm, "normalises groups of channels over all places"),
)
REDUCTION = re.compile(
    r"\b(mean|sum|cumsum|var|std|var_mean|norm|layer_norm|rms_norm|normalize)\("
)


def why_not_a_norm(
    path: str, module: torch.nn.Module, reported: set[str]
) -> str | None:
    """A line for the module at `path`, whose name says norm and which a patch does not
    report; None if there is none.

    Args:
        reported: the paths of all modules that were swapped, or left alone with a
            reason.
    """
    inside = [(p, m) for p, m in module.named_modules(prefix=path) if p != path]
    if any(p in reported or "norm" in type(m).__name__.lower() for p, m in inside):
        return "a container: the norms inside it are listed by themselves"
    for cls, words in TORCH:
        if isinstance(module, cls):
            return words
    if inside:
        kinds = ", ".join(
            sorted({type(m).__name__ for _, m in inside if not any(m.children())})
        )
        return f"made of {kinds}, none of which is a norm"
    return _of_one_module(module)


def _of_one_module(module: torch.nn.Module) -> str | None:
    if type(module).__module__.startswith("torch.nn.utils"):
        return "computes a weight of another module, from parameters alone"
    stored = [
        name for name, _ in module.named_buffers() if re.search(r"mean|var|std", name)
    ]
    if stored:
        return f"scales by what it has stored ({', '.join(sorted(stored))}), not by statistics of its input"
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind < 2]
    if len(needed) > 1:
        return f"takes several tensors at once ({', '.join(needed)})"
    code = inspect.getsource(type(module).forward)
    if "cumsum(" in code:
        return "normalises over all places up to the present one"
    if not REDUCTION.search(code):
        return "takes no mean, sum or norm of its input"
    return None
