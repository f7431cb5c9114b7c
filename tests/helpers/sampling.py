"""Which tests a tier runs, and how many cases of a parametrised one."""

from collections import defaultdict
from pathlib import Path

CASES = {"quick": 1, "all": 2}  # of each test function; of one that is marked full, one


def choose(tier: str, items: list, named_files: set[Path]) -> list:
    """The tests of `items` that `tier` runs, in their order. Of a named file all run
    but the nightly ones.
    """
    if tier == "nightly":
        return items
    items = [item for item in items if not _has(item, "nightly")]
    chosen = {item for item in items if item.path in named_files}
    groups = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0], _has(item, "full")].append(item)
    for (_, is_full), cases in groups.items():
        if not is_full:
            chosen.update(spread(cases, CASES[tier]))
        elif tier == "all":
            chosen.update(spread(cases, 1))
    return [item for item in items if item in chosen]


def spread(items: list, count: int) -> list:
    """At most `count` of `items`, evenly spread, with the first and the last among
    them.
    """
    if len(items) <= count:
        return items
    last = len(items) - 1
    return [items[round(last * step / max(count - 1, 1))] for step in range(count)]


def _has(item, marker: str) -> bool:
    return item.get_closest_marker(marker) is not None
