"""Summaries of many results of `patch`: totals, norms left alone with the reason, and
the table.
"""

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
                for part, equal, repeatable in zip(
                    run["parts_run"], run[key], run["repeatable"], strict=True
                )
                if repeatable and not equal
            ]
        found += [
            f"{p} ({c}): {formula} is not bit-equal"
            for p, c, formula in run["norms_unequal"]
        ]
        found += [word for word in ("saved_equal", "classes_restored") if not run[word]]
        found += [
            f"{c}: neither swapped nor explained"
            for c, reason, _ in run["not_norms"]
            if not reason
        ]
        fusion = run.get("fusion", {})
        found += [
            f"fusion: not {key}"
            for key in ("bit_equal", "tokens_equal")
            if fusion.get(key) is False
        ]
    return list(dict.fromkeys(found))


def fused(run: dict) -> set[str]:
    """What of a model runs in one launch: "sums", "pairs" of q and k norms,
    "modulations", "rotations" alone.
    """
    words = [
        how for _, how, _ in run.get("layers", []) if not how.startswith("not fused")
    ]
    kinds = (
        "modulations"
        if "(1 + scale)" in how
        else "sums"
        if how.startswith("+ ")
        else "pairs"
        if "norm" in how or "ln" in how
        else "rotations"
        for how in words
    )
    return set(kinds)


def totals(results: list[dict]) -> dict:
    runs = [run for r in results for run in r["runs"][:1]]
    verdicts = [bool(wrong(r)) for r in results]
    fusions = Counter(kind for run in runs for kind in fused(run))
    ran = [bool(r["ran"]) for r in results]
    return {
        "tried": len(results),
        "built": sum(bool(r["built"]) for r in results),
        "run": sum(ran),
        "bit_equal": sum(
            it_ran and not bad for it_ran, bad in zip(ran, verdicts, strict=True)
        ),
        "with_wrong_results": sum(verdicts),
        "not_repeatable": sum(not all(run["repeatable"]) for run in runs),
        "norms_swapped": sum(_sum(run["swapped"]) for run in runs),
        "norms_left_alone": sum(_sum(run["left_alone"]) for run in runs),
        "types_with_fused_sums": fusions["sums"],
        "types_with_fused_pairs": fusions["pairs"],
        "types_with_fused_modulations": fusions["modulations"],
        "swapped_by_formula": _by_formula(runs),
    }


def _by_formula(runs: list[dict]) -> dict[str, int]:
    """How many norms of each formula were swapped, the most first."""
    formulas: Counter = Counter()
    for run in runs:
        for _, formula, count in run["swapped"]:
            formulas[formula] += count
    return dict(formulas.most_common())


def by_reason(results: list[dict], key: str) -> list[dict]:
    """Per class and reason of "left_alone" or "not_norms": how many modules, in which
    types.
    """
    groups: dict[tuple[str, str], dict] = {}
    for result in results:
        most: dict[tuple[str, str], int] = {}
        for class_name, reason, n in (
            entry for run in result["runs"] for entry in run[key]
        ):
            most[class_name, reason] = max(n, most.get((class_name, reason), 0))
        for pair, n in most.items():
            group = groups.setdefault(pair, {"modules": 0, "types": []})
            group["modules"] += n
            group["types"].append(result["type"])
    return [
        {"class": c, "reason": reason, **g}
        for (c, reason), g in sorted(groups.items(), key=str)
    ]


def table(results: list[dict]) -> str:
    lines = [f"{'type':<34} {'norms':>5} {'alone':>5} {'run':>5}  {'style':<9} result"]
    lines += [_line(r) for r in results]
    if fused := [
        (r["type"], run["fusion"])
        for r in results
        for run in r["runs"][:1]
        if "fusion" in run
    ]:
        lines += [
            "",
            "operators and launches of one forward: before, norms swapped, fused (of which launches):",
        ]
        lines += [
            f"{name:<34} {'{:>5} {:>5} {:>5}'.format(*f['operators'])} ({f['launches']})"
            for name, f in fused
        ]
    for title, key in (
        ("left alone", "left_alone"),
        ("no norms, whatever their names say", "not_norms"),
    ):
        lines += ["", f"{title}:"]
        lines += [
            f"  {g['modules']:>4} x {g['class']}: {g['reason']}  [{', '.join(g['types'][:4])}]"
            for g in by_reason(results, key)
        ]
    lines += [
        "",
        *(f"{k}: {v}" for k, v in totals(results).items() if k != "swapped_by_formula"),
    ]
    return "\n".join(lines)


def _line(result: dict) -> str:
    """One type."""
    figures = f"{'':>5} {'':>5} {'':>5}  {'':<9}"
    if result["runs"]:
        run = result["runs"][0]
        counts = f"{_sum(run['swapped']):>5} {_sum(run['left_alone']):>5} {run['norms_run']:>5}"
        figures = f"{counts}  {run['style']:<9}"
    return f"{result['type']:<34} {figures} {_verdict(result)}"


def _verdict(result: dict) -> str:
    error = (result["error"] or "")[:110]
    if not result["built"]:
        return f"not built: {error}"
    if changed := wrong(result):
        return "; ".join(changed[:3])
    return "bit-equal" if result["ran"] else f"not run: {error}"


def _sum(entries: list[list]) -> int:
    return sum(n for *_, n in entries)


# arguments of the model; errors behind the first; figures of a plan that no page shows
NOT_COMMITTED = {
    "arguments", "parameters", "errors", "margins", "centred", "scaled", "copied",
    "undetermined",
}  # fmt: skip


def committed(result):
    """A result without what nothing reads later."""
    if isinstance(result, dict):
        return {
            key: committed(value)
            for key, value in result.items()
            if key not in NOT_COMMITTED
        }
    return (
        [committed(value) for value in result] if isinstance(result, list) else result
    )


def lines_of(results: list[dict]) -> str:
    """JSON with a line for each type, so that a change of one is a line of a diff."""
    lines = (json.dumps(committed(result), separators=(",", ":")) for result in results)
    return "[\n" + ",\n".join(lines) + "\n]"


def dumped(document: dict) -> str:
    """The JSON of `patch`."""
    types = {name: part["types"] for name, part in document["mappings"].items()}
    mappings = {
        name: {**part, "types": f"<{name}>"}
        for name, part in document["mappings"].items()
    }
    text = json.dumps({**document, "mappings": mappings}, indent=1)
    for name, results in types.items():
        text = text.replace(f'"<{name}>"', lines_of(results))
    return text + "\n"
