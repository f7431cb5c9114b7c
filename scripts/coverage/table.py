"""The coverage table of docs/formulas.md, made from the committed results of `python -m scripts.coverage patch`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from . import BadOptions

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "scripts" / "results"
PAGE = ROOT / "docs" / "formulas.md"
BEGIN, END = "<!-- coverage: made by python -m scripts.coverage table --write -->", "<!-- end of coverage -->"
BLOCK = re.compile(f"{re.escape(BEGIN)}\n.*?{re.escape(END)}", re.DOTALL)
MAPPINGS = {"causal": "causal language models", "base": "base models"}
LONGEST = 110  # characters of a reason


def newest() -> Path:
    """The results for the newest version of Transformers."""
    return max(RESULTS.glob("coverage-*.json"), key=lambda p: [int(n) for n in re.findall(r"\d+", p.stem)])


def block(document: dict) -> str:
    """The page's part between the two markers, both included."""
    version = document["versions"]["transformers"]
    lines = [
        BEGIN,
        f"| Transformers {version} | types | built | run | norms swapped | left alone | wrong results |",
        "|---|---|---|---|---|---|---|",
    ]
    for mapping, words in MAPPINGS.items():
        t = document["mappings"][mapping]["totals"]
        counts = [t[k] for k in ("types", "built", "run", "norms_swapped", "norms_left_alone", "with_wrong_results")]
        lines.append(f"| {words} | {' | '.join(map(str, counts))} |")
    left = _left_alone(document)
    if left:
        lines += ["", "| left alone | because |", "|---|---|"]
        lines += [f"| {', '.join(f'`{c}`' for c in classes)} | {reason} |" for reason, classes in left]
    return "\n".join([*lines, END])


def _left_alone(document: dict) -> list[tuple[str, list[str]]]:
    """(reason, classes), the most classes first."""
    classes: dict[str, set[str]] = {}
    for mapping in MAPPINGS:
        for group in document["mappings"][mapping]["left_alone"]:
            classes.setdefault(_short(group["reason"]), set()).add(group["class"])
    return sorted(((r, sorted(cs)) for r, cs in classes.items()), key=lambda pair: (-len(pair[1]), pair[0]))


def _short(reason: str) -> str:
    reason = reason.replace("|", "/")
    return reason if len(reason) <= LONGEST else f"{reason[: LONGEST - 4].rsplit(' ', 1)[0]} ..."


def run(options) -> int:
    """What ``python -m scripts.coverage table`` does; returns 1 where --check finds another table."""
    table = block(json.loads(newest().read_text(encoding="utf-8")))
    page = PAGE.read_text(encoding="utf-8")
    if (options.check or options.write) and len(BLOCK.findall(page)) != 1:
        raise BadOptions(f"docs/formulas.md must have the lines {BEGIN} and {END} once")
    if options.check:
        if BLOCK.search(page)[0] != table:
            print("docs/formulas.md has another table than the results: run python -m scripts.coverage table --write")
            return 1
        return 0
    if options.write:
        PAGE.write_text(BLOCK.sub(lambda match: table, page), encoding="utf-8")
        return 0
    print(table)
    return 0
