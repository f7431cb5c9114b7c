"""Patch a tiny random model of every type in Transformers and compare it, bit for bit,
with the model before.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from pathlib import Path

import transformers

from hf_rmsnorm.cli.env import versions

from . import launches
from .compare import UNEXAMINED, examine
from .models import MAPPINGS
from .runs import Task, chosen, take

PACKAGES = ("torch", "transformers")
MODELS = Path(importlib.util.find_spec("transformers").origin).parent / "models"
TIME_LIMIT = 1_800  # seconds a type may take, on a busy machine; few take over 20


def run(options) -> int:
    """What ``python -m scripts.coverage patch`` does; returns 1 where a type gave a
    wrong result, or launches fewer kernels than in the file of ``--check``.
    """
    transformers.logging.set_verbosity_error()
    mappings = MAPPINGS if options.mapping == "all" else (options.mapping,)
    jobs = [(t, mapping) for mapping in mappings for t in MAPPINGS[mapping]]
    types = chosen(options.only, [t for t, _ in jobs])
    task = Task(
        examine,
        verdict,
        document,
        warm=("llama", "causal"),
        seconds=TIME_LIMIT,
        unexamined=UNEXAMINED,
    )
    results = take(task, [job for job in jobs if job[0] in types], options)
    for mapping, of_mapping in _by_mapping(results).items():
        figures = totals(of_mapping).items()
        print(f"{mapping}: " + ", ".join(f"{k} {v}" for k, v in figures))
    is_wrong = any(map(wrong, results))
    if options.check:
        mappings = launches.read(options.check)["mappings"].values()
        before = [result for part in mappings for result in part["types"]]
        is_wrong |= launches.print_falls(launched(before), launched(results))
    return int(is_wrong)


def launched(results: list[dict]) -> dict[str, launches.Counts]:
    """What each type launches, with and without its optional features."""
    found = {}
    for result in results:
        counts = found.setdefault(f"{result['mapping']} {result['type']}", {})
        for run in result["runs"]:
            suffix = " with its options" if run["features"] else ""
            counts.update(launches.flat(run.get("launched", {}), suffix))
    return found


def verdict(result: dict) -> str:
    return "; ".join(wrong(result)[:2]) or ("ok" if result["ran"] else result["error"])


def _by_mapping(results: list[dict]) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for result in results:
        found.setdefault(result["mapping"], []).append(result)
    return found


def document(results: list[dict]) -> dict:
    """The JSON."""
    mappings = {}
    for mapping, of_mapping in _by_mapping(results).items():
        mappings[mapping] = {
            "totals": {"types": len(MAPPINGS[mapping]), **totals(of_mapping)},
            "left_alone": by_reason(of_mapping, "left_alone"),
            "not_norms": by_reason(of_mapping, "not_norms"),
            "types": [{**result, "wrong": wrong(result)} for result in of_mapping],
        }
    made = {"versions": versions(PACKAGES), "mappings": mappings}
    return made | {"not_built": not_built(made)}


def wrong(result: dict) -> list[str]:
    """Changes that a patch must not make, in words."""
    found = []
    for run in result["runs"]:
        found += _unequal(run)
        for path, name, formula in run["norms_unequal"]:
            found.append(f"{path} ({name}): {formula} is not bit-equal")
        found += [word for word in ("saved_equal", "classes_restored") if not run[word]]
        for name, reason, _ in run["not_norms"]:
            if not reason:
                found.append(f"{name}: neither swapped nor explained")
        for key in ("bit_equal", "tokens_equal"):
            if run.get("fusion", {}).get(key) is False:
                found.append(f"fusion: not {key}")
    return list(dict.fromkeys(found))


def _unequal(run: dict) -> list[str]:
    """Of a model and its parts, what differs although it can be repeated."""
    found = []
    for key in ("bit_equal", "restored_equal"):
        parts = zip(run["parts_run"], run[key], run["repeatable"], strict=True)
        for part, equal, repeatable in parts:
            if repeatable and not equal:
                found.append(f"{part or 'model'}: not {key}")
    return found


def fused(run: dict) -> set[str]:
    """What of a model runs in one launch: "sums", or "pairs" of q and k norms."""
    found = set()
    for _, how, _ in run["layers"]:
        if how.startswith("not fused") or "(1 + scale)" in how:
            continue
        if how.startswith("+ "):
            found.add("sums")
        elif "norm" in how or "ln" in how:
            found.add("pairs")
    return found


def totals(results: list[dict]) -> dict[str, int]:
    first = [run for result in results for run in result["runs"][:1]]
    kinds = Counter(kind for run in first for kind in fused(run))
    return {
        "tried": len(results),
        "built": sum(result["built"] for result in results),
        "run": sum(result["ran"] for result in results),
        "with_wrong_results": sum(bool(wrong(result)) for result in results),
        "not_repeatable": sum(not all(run["repeatable"]) for run in first),
        "norms_swapped": sum(n for run in first for *_, n in run["swapped"]),
        "norms_left_alone": sum(n for run in first for *_, n in run["left_alone"]),
        "types_with_fused_sums": kinds["sums"],
        "types_with_fused_pairs": kinds["pairs"],
    }


def by_reason(results: list[dict], key: str) -> list[dict]:
    """Per class and reason of "left_alone" or "not_norms": how many modules, in which
    types.
    """
    groups: dict[tuple[str, str], dict] = {}
    for result in results:
        most: Counter = Counter()
        for run in result["runs"]:
            most |= Counter({(name, reason): n for name, reason, n in run[key]})
        for pair, n in most.items():
            group = groups.setdefault(pair, {"modules": 0, "types": []})
            group["modules"] += n
            group["types"].append(result["type"])
    return [
        {"class": name, "reason": reason, **group}
        for (name, reason), group in sorted(groups.items(), key=str)
    ]


def norm_classes(folder: Path = MODELS) -> dict[str, list[str]]:
    """Every class with "norm" in its name and a forward, its own or one that a class of
    that file gives it; by its name the classes of its file that make or extend it, each
    given as ``<file>:<class>``.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*/modeling_*.py")):
        nodes = ast.parse(path.read_text(encoding="utf-8")).body
        classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
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
        if not users:
            reasons[name] = "no class of its file uses it"
        elif blocked:
            reasons[name] = f"its model is not built: {blocked[0]}"
        else:
            never = "which no type of the two mappings builds with it"
            reasons[name] = f"made by {made}, {never}"
    return reasons
