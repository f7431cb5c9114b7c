"""Summaries of many results of `patch`: totals, norms left alone with the reason, and the table."""

from __future__ import annotations

import json
from collections import Counter


def wrong(result: dict) -> list[str]:
    """Changes that a patch must not make, in words."""
    found = []
    for run in result["runs"]:
        for key in ("bit_equal", "restored_equal"):
            found += [
                f"{part or 'model'}: not {key}"
                for part, equal, repeatable in zip(run["parts_run"], run[key], run["repeatable"], strict=True)
                if repeatable and not equal
            ]
        found += [f"{p} ({c}): {formula} is not bit-equal" for p, c, formula in run["norms_unequal"]]
        found += [word for word in ("saved_equal", "classes_restored") if not run[word]]
        found += [f"{c}: neither swapped nor explained" for c, reason, _ in run["not_norms"] if not reason]
        found += run.get("interpreter", {}).get("failures", [])
        fusion = run.get("fusion", {})
        found += [f"fusion: not {key}" for key in ("bit_equal", "tokens_equal") if fusion.get(key) is False]
    return list(dict.fromkeys(found))


def fused(run: dict) -> set[str]:
    """What of a model runs in one launch with a norm: "sums", "pairs" of q and k, "modulations"."""
    words = [how for _, how, _ in run.get("layers", []) if not how.startswith("not fused")]
    kinds = ("modulations" if "(1 + scale)" in how else "sums" if how.startswith("+ ") else "pairs" for how in words)
    return set(kinds)


def totals(results: list[dict]) -> dict:
    runs = [run for r in results for run in r["runs"][:1]]
    formulas: Counter = Counter()
    for _, formula, n in (entry for run in runs for entry in run["swapped"]):
        formulas[formula] += n
    return {
        "tried": len(results),
        "built": sum(bool(r["built"]) for r in results),
        "run": sum(bool(r["ran"]) for r in results),
        "bit_equal": sum(bool(r["ran"]) and not wrong(r) for r in results),
        "with_wrong_results": sum(bool(wrong(r)) for r in results),
        "not_repeatable": sum(not all(run["repeatable"]) for run in runs),
        "norms_swapped": sum(n for run in runs for *_, n in run["swapped"]),
        "norms_left_alone": sum(n for run in runs for *_, n in run["left_alone"]),
        **{
            f"types_with_fused_{kind}": sum(kind in fused(run) for run in runs)
            for kind in ("sums", "pairs", "modulations")
        },
        "swapped_by_formula": dict(formulas.most_common()),
    }


def by_reason(results: list[dict], key: str) -> list[dict]:
    """Per class and reason of "left_alone" or "not_norms": how many modules, in which types."""
    groups: dict[tuple[str, str], dict] = {}
    for result in results:
        most: dict[tuple[str, str], int] = {}
        for class_name, reason, n in (entry for run in result["runs"] for entry in run[key]):
            most[class_name, reason] = max(n, most.get((class_name, reason), 0))
        for pair, n in most.items():
            group = groups.setdefault(pair, {"modules": 0, "types": []})
            group["modules"] += n
            group["types"].append(result["type"])
    return [{"class": c, "reason": reason, **g} for (c, reason), g in sorted(groups.items(), key=str)]


def table(results: list[dict]) -> str:
    lines = [f"{'type':<34} {'norms':>5} {'alone':>5} {'run':>5}  {'style':<9} result"]
    for r in results:
        run = r["runs"][0] if r["runs"] else None
        verdict = "; ".join(wrong(r)[:3]) or ("bit-equal" if r["ran"] else f"not run: {(r['error'] or '')[:110]}")
        if not r["built"]:
            verdict = f"not built: {(r['error'] or '')[:110]}"
        if run is None:
            lines.append(f"{r['type']:<34} {'':>5} {'':>5} {'':>5}  {'':<9} {verdict}")
            continue
        lines.append(
            f"{r['type']:<34} {_sum(run['swapped']):>5} {_sum(run['left_alone']):>5} {run['norms_run']:>5}  "
            f"{run['style']:<9} {verdict}"
        )
    if fused := [(r["type"], run["fusion"]) for r in results for run in r["runs"][:1] if "fusion" in run]:
        lines += ["", "operators and launches of one forward: before, norms swapped, fused (of which launches):"]
        lines += [f"{name:<34} {'{:>5} {:>5} {:>5}'.format(*f['operators'])} ({f['launches']})" for name, f in fused]
    for title, key in (("left alone", "left_alone"), ("no norms, whatever their names say", "not_norms")):
        lines += ["", f"{title}:"]
        lines += [
            f"  {g['modules']:>4} x {g['class']}: {g['reason']}  [{', '.join(g['types'][:4])}]"
            for g in by_reason(results, key)
        ]
    lines += ["", *(f"{k}: {v}" for k, v in totals(results).items() if k != "swapped_by_formula")]
    return "\n".join(lines)


def _sum(entries: list[list]) -> int:
    return sum(n for *_, n in entries)


NOT_COMMITTED = {  # arguments of the model; errors behind the first; figures of a plan that no page shows
    "arguments", "parameters", "errors", "margins", "centred", "scaled", "copied", "undetermined",
}  # fmt: skip


def committed(result):
    """A result without what nothing reads later."""
    if isinstance(result, dict):
        return {key: committed(value) for key, value in result.items() if key not in NOT_COMMITTED}
    return [committed(value) for value in result] if isinstance(result, list) else result


def lines_of(results: list[dict]) -> str:
    """JSON with a line for each type, so that a change of one is a line of a diff."""
    lines = (json.dumps(committed(result), separators=(",", ":")) for result in results)
    return "[\n" + ",\n".join(lines) + "\n]"


def dumped(document: dict) -> str:
    """The JSON of `patch`."""
    types = {name: part["types"] for name, part in document["mappings"].items()}
    mappings = {name: {**part, "types": f"<{name}>"} for name, part in document["mappings"].items()}
    text = json.dumps({**document, "mappings": mappings}, indent=1)
    for name, results in types.items():
        text = text.replace(f'"<{name}>"', lines_of(results))
    return text + "\n"
