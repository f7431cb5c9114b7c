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
        classes = {}
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
        for norm in classes:
            if _is_norm(classes[norm], classes):
                users = [name for name in classes if norm in _names(classes[name])]
                found.setdefault(norm, [])
                found[norm] += [f"{path.stem}:{name}" for name in users]
    return found


def _is_norm(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    # whole models, RobertaPreLayerNormForMaskedLM say, hold norms and are none
    is_model = any(base.endswith("PreTrainedModel") for base in _bases(node))
    return "norm" in node.name.lower() and not is_model and _has_forward(node, classes)


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _bases(node: ast.ClassDef) -> list[str]:
    return [base.id for base in node.bases if isinstance(base, ast.Name)]


def _has_forward(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    own = [item.name for item in node.body if isinstance(item, ast.FunctionDef)]
    bases = [classes[base] for base in _bases(node) if base in classes]
    return "forward" in own or any(_has_forward(base, classes) for base in bases)


def seen_classes(document: dict) -> set[str]:
    """The classes that a JSON of `patch` names: swapped, left alone, or no norms."""
    found = set()
    for part in document["mappings"].values():
        for run in (run for result in part["types"] for run in result["runs"]):
            for key in ("swapped", "left_alone", "not_norms"):
                found.update(name for name, *_ in run[key])
    return found


def not_built(document: dict) -> dict[str, str]:
    """The norm classes that no model of the table holds, each with the reason as far as
    the source tells it.
    """
    classes = norm_classes()
    unbuilt = {}
    for part in document["mappings"].values():
        for result in part["types"]:
            if not result["built"]:
                file = f"modeling_{result['type'].replace('-', '_')}"
                unbuilt[file] = result["error"]
    reasons = {}
    for name in sorted(classes.keys() - seen_classes(document)):
        users = [user.split(":") for user in sorted(classes[name])]
        blocked = sorted(unbuilt[file] for file, _ in users if file in unbuilt)
        made = ", ".join(user for _, user in users)
        reasons[name] = (
            f"made by {made}, which no type of the two mappings builds with it"
        )
        if blocked:
            reasons[name] = f"its model is not built: {blocked[0]}"
        if not users:
            reasons[name] = "no class of its file uses it"
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
