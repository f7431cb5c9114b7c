"""Patch a tiny random model of every type in Transformers and compare it, bit for bit,
with the model before.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial

import transformers

from hf_rmsnorm.cli.env import versions

from .compare import UNEXAMINED, examine
from .models import MAPPINGS, chosen
from .runs import Job, Task, lines_of, read, take
from .unreported import not_built

PACKAGES = ("torch", "transformers")
TIME_LIMIT = 180  # seconds a type may take, on a slow machine


def run(options) -> int:
    """What ``python -m scripts.coverage patch`` does; returns 1 where a type gave a
    wrong result.
    """
    transformers.logging.set_verbosity_error()
    only = chosen(options.only)
    found = _earlier(options.update) if options.update else {}
    mappings = MAPPINGS if options.mapping == "all" else (options.mapping,)
    jobs = []
    for mapping in mappings:
        types = [t for t in MAPPINGS[mapping] if only is None or t in only]
        jobs += [(t, mapping) for t in types]
    task = Task(
        partial(examine, interpreter=options.interpreter),
        verdict,
        wrong,
        text,
        warm=("llama", "causal"),
        seconds=TIME_LIMIT * (3 if options.interpreter else 1),
        unexamined=UNEXAMINED,
    )
    code = take(task, jobs, found, options)
    for mapping, results in _by_mapping(found).items():
        figures = totals(results)
        del figures["swapped_by_formula"]
        print(f"{mapping}: " + ", ".join(f"{k} {v}" for k, v in figures.items()))
    return code


def verdict(result: dict) -> str:
    return "; ".join(wrong(result)[:2]) or ("ok" if result["ran"] else result["error"])


def _earlier(path) -> dict[Job, dict]:
    """The results of a JSON made earlier."""
    found = {}
    for mapping, part in read(path)["mappings"].items():
        found |= {(result["type"], mapping): result for result in part["types"]}
    return found


def _by_mapping(found: dict[Job, dict]) -> dict[str, list[dict]]:
    ordered = {}
    for mapping, types in MAPPINGS.items():
        results = [found[t, mapping] for t in types if (t, mapping) in found]
        if results:
            ordered[mapping] = results
    return ordered


def text(found: dict[Job, dict]) -> str:
    """The JSON, with a line for each type."""
    document = {"versions": versions(PACKAGES), "mappings": {}}
    lines = {}
    for mapping, results in _by_mapping(found).items():
        types = [{**r, "wrong": wrong(r)} for r in results]
        lines[f'"<{mapping}>"'] = lines_of(types)
        document["mappings"][mapping] = {
            "totals": {"types": len(MAPPINGS[mapping]), **totals(results)},
            "left_alone": by_reason(results, "left_alone"),
            "not_norms": by_reason(results, "not_norms"),
            "types": types,
        }
    document["not_built"] = not_built(document)
    for mapping, part in document["mappings"].items():
        part["types"] = f"<{mapping}>"
    made = json.dumps(document, indent=1)
    for place, of_types in lines.items():
        made = made.replace(place, of_types)
    return made + "\n"


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
    """What of a model runs in one launch: "sums", "pairs" of q and k norms,
    "modulations", "rotations" alone.
    """
    return {
        _kind(how)
        for _, how, _ in run.get("layers", [])
        if not how.startswith("not fused")
    }


def _kind(how: str) -> str:
    if "(1 + scale)" in how:
        return "modulations"
    if how.startswith("+ "):
        return "sums"
    return "pairs" if "norm" in how or "ln" in how else "rotations"


def totals(results: list[dict]) -> dict:
    count: Counter = Counter()
    fusions: Counter = Counter()
    formulas: Counter = Counter()
    for result in results:
        is_wrong = bool(wrong(result))
        count["built"] += bool(result["built"])
        count["run"] += bool(result["ran"])
        count["equal"] += result["ran"] and not is_wrong
        count["wrong"] += is_wrong
        for run in result["runs"][:1]:
            fusions.update(fused(run))
            count["not repeatable"] += not all(run["repeatable"])
            for _, formula, norms in run["swapped"]:
                formulas[formula] += norms
            for _, _, norms in run["left_alone"]:
                count["left alone"] += norms
    return {
        "tried": len(results),
        "built": count["built"],
        "run": count["run"],
        "bit_equal": count["equal"],
        "with_wrong_results": count["wrong"],
        "not_repeatable": count["not repeatable"],
        "norms_swapped": formulas.total(),
        "norms_left_alone": count["left alone"],
        "types_with_fused_sums": fusions["sums"],
        "types_with_fused_pairs": fusions["pairs"],
        "types_with_fused_modulations": fusions["modulations"],
        "swapped_by_formula": dict(formulas.most_common()),
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
