"""Paths written as one stand for exactly the paths they came from."""

import re
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from hf_rmsnorm.paths import compact_paths

NUMBERS = st.integers(0, 12).map(str)
NAMES = st.sampled_from(["layers", "norm", "b{0}x", "h1"])
PARTS = st.lists(NUMBERS | NAMES, max_size=4)
PATHS = st.lists(PARTS.map(".".join), max_size=25)


def expanded(written):
    """Every path that a compact one stands for."""
    if written == "(the model itself)":
        return [""]
    pieces = []
    for text, ranges in re.findall(r"([^\[]+)|\[([\d,-]+)\]", written):
        choices = []
        if text:
            choices.append(text)
        for first, last in re.findall(r"(\d+)-?(\d*)", ranges):
            numbers = range(int(first), int(last or first) + 1)
            choices.extend(map(str, numbers))
        pieces.append(choices)
    return ["".join(choice) for choice in product(*pieces)]


@given(PATHS)
def test_nothing_is_added_or_lost_or_said_twice(paths):
    found = []
    for written in compact_paths(paths):
        for path in expanded(written):
            found.append(path)
    assert sorted(found) == sorted(set(paths))


def test_ranges_holes_and_blocks_of_two_numbers():
    paths = [f"layers.{i}.norm" for i in (0, 1, 2, 5)]
    assert compact_paths(paths) == ["layers.[0-2,5].norm"]
    paths = ["0.experts.0", "0.experts.1", "1.experts.0", "1.experts.1"]
    assert compact_paths(paths) == ["[0-1].experts.[0-1]"]
    assert compact_paths(["", "norm", "norm"]) == ["(the model itself)", "norm"]
