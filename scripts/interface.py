"""The page of the Python interface: signatures and docstrings as the source has them."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pkgutil import resolve_name

SECTIONS = {
    "Patching": [
        "patching.api.patch_model",
        "patching.api.unpatch_model",
        "patching.api.patched",
        "patching.api.is_patched",
        "patching.report.PatchReport",
        "patching.report.Swapped",
        "patching.report.Skipped",
        "patching.report.FusedLayer",
    ],
    "Operators": [
        "ops.norm.rms_norm",
        "ops.norm.layer_norm",
        "ops.settings.use_backend",
        "ops.settings.Settings",
        "patching.launch_counts.count_launches",
        "patching.launch_counts.Piece",
        "formula.NormSpec",
    ],
    "Verification": [
        "verification.equivalence.verify_equivalence",
        "verification.report.EquivalenceReport",
        "verification.checks.Check",
    ],
    "Conversion": [
        "conversion.api.convert_checkpoint",
        "conversion.api.plan_conversion",
        "conversion.options.ConversionOptions",
        "conversion.api.Conversion",
        "conversion.targets.planned.PlannedConversion",
        "conversion.errors.ConversionRefused",
        "conversion.errors.ConversionError",
        "conversion.verify.compare.VerificationFailed",
    ],
    "Training": [
        "integrations.trainer.HfRmsNormCallback",
        "converted.finetuned.Recentre",
        "converted.finetuned.train_as_rms",
    ],
    "Demo models": ["demo.demo_path"],
}


def objects() -> list:
    """The functions and classes that the page documents."""
    paths = [path for section in SECTIONS.values() for path in section]
    return [resolve_name(f"hf_rmsnorm.{path}") for path in paths]


def page() -> list[str]:
    """The lines of the page below its introduction."""
    lines = []
    for section, paths in SECTIONS.items():
        lines += ["", f"## {section}"]
        for path in paths:
            documented = resolve_name(f"hf_rmsnorm.{path}")
            lines += ["", f"### {documented.__name__}", ""]
            lines += ["```py", *outline(documented), "```"]
    return lines[1:]


def outline(documented) -> list[str]:
    """The lines of a function or class without its code: what is public, to the end of
    each docstring.
    """
    source = textwrap.dedent(inspect.getsource(documented))
    lines = source.splitlines()
    (node,) = ast.parse(source).body
    shown = _to_docstring(node, lines)
    if isinstance(node, ast.ClassDef):
        for part in node.body:
            if isinstance(part, ast.AnnAssign):
                shown += _with_space_above(part, lines)
            elif isinstance(part, ast.FunctionDef) and not part.name.startswith("_"):
                shown += ["", *_to_docstring(part, lines)]
    return shown


def _to_docstring(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> list[str]:
    """The lines from the first decorator to the end of the docstring; without one, to
    the end of the signature.
    """
    first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
    end = node.body[0].end_lineno
    if ast.get_docstring(node) is None:
        end = node.body[0].lineno - 1
    return lines[first - 1 : end]


def _with_space_above(node: ast.AnnAssign, lines: list[str]) -> list[str]:
    """The lines of a field, with the empty line above it if there is one."""
    first = node.lineno - 1
    if not lines[first - 1].strip():
        first -= 1
    return lines[first : node.end_lineno]
