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
        test = item.nodeid.partition("[")[0]
        groups[test, _has(item, "full")].append(item)
    for (_, is_full), cases in groups.items():
        if not is_full:
            chosen.update(_first_and_last(cases)[: CASES[tier]])
        elif tier == "all":
            chosen.add(cases[0])
    return [item for item in items if item in chosen]


def _first_and_last(cases: list) -> list:
    """The cases, of more than two the first and the last."""
    if len(cases) == 1:
        return cases
    return [cases[0], cases[-1]]


def _has(item, marker: str) -> bool:
    return item.get_closest_marker(marker) is not None
