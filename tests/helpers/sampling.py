"""Which tests a tier runs, and how many cases of a parametrised one."""

from collections import defaultdict
from pathlib import Path

CASES = {"quick": 1, "all": 4}  # at most so many cases of a test function


def choose(tier: str, items: list, named_files: set[Path]) -> list:
    """The tests of `items` that `tier` runs, in their order. Of a named file all run but the nightly ones."""
    if tier == "nightly":
        return items
    by_function = defaultdict(list)
    for item in items:
        by_function[item.nodeid.partition("[")[0]].append(item)
    chosen = set()
    for cases in by_function.values():
        named = cases[0].path in named_files
        cases = [case for case in cases if named or _in_tier(case, tier)]
        chosen.update(cases if named else spread(cases, CASES[tier]))
    return [item for item in items if item in chosen and not item.get_closest_marker("nightly")]


def spread(items: list, count: int) -> list:
    """At most `count` of `items`, evenly spread, with the first and the last among them."""
    if len(items) <= count:
        return items
    last = len(items) - 1
    return [items[round(last * step / max(count - 1, 1))] for step in range(count)]


def _in_tier(item, tier: str) -> bool:
    if item.get_closest_marker("nightly") is not None:
        return False
    return tier == "all" or item.get_closest_marker("full") is None
