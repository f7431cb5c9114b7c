"""Text for people: module paths that differ in their numbers written as one, lines that
fit, a word that is meant.
"""

import difflib
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby


def fitted(text: str, hang: int = 4) -> str:
    """The text in 100 columns: what is longer goes on `hang` columns further in, and no
    path is broken.
    """

    def fit(line: str) -> str:
        ahead = " " * (len(line) - len(line.lstrip()) + hang)
        return textwrap.fill(
            line,
            100,
            subsequent_indent=ahead,
            break_long_words=False,
            break_on_hyphens=False,
        )

    return "\n".join(
        fit(line) if " " in line.strip() else line for line in text.splitlines()
    )


def compact_paths(paths: Sequence[str]) -> list[str]:
    """Paths that differ in their numbers written as one,
    ``model.layers.[0-31].input_layernorm``.
    """
    families: dict[str, list[tuple[int, ...]]] = {}
    for path in dict.fromkeys(paths):
        template = re.sub(
            r"(^|(?<=\.))\d+(?=\.|$)", "{}", path.replace("{", "{{").replace("}", "}}")
        )
        numbers = tuple(int(part) for part in path.split(".") if part.isdecimal())
        families.setdefault(template, []).append(numbers)
    boxes = (
        (template, axes)
        for template, tuples in families.items()
        for axes in _boxes(tuples)
    )
    return [template.format(*axes) or "(the model itself)" for template, axes in boxes]


def _boxes(tuples: list[tuple[int, ...]]) -> list[list[str]]:
    """Cover tuples of numbers by products of ranges, each written out per position."""
    axes = [sorted(set(axis)) for axis in zip(*tuples, strict=True)]
    if math.prod(map(len, axes)) == len(set(tuples)):
        return [[_ranges(axis) for axis in axes]]
    split = next(i for i, axis in enumerate(axes) if len(axis) > 1)
    return [
        box
        for value in axes[split]
        for box in _boxes([t for t in tuples if t[split] == value])
    ]


def _ranges(numbers: Iterable[int]) -> str:
    # In a run of neighbours each number is ahead of its place by as much.
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda each: each[1] - each[0])
    ]
    texts = [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return texts[0] if texts == [f"{runs[0][0]}"] else f"[{','.join(texts)}]"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What to add to an error about a word: the known one that is like it, if there is
    any.
    """
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, 1, cutoff=0.5)
    return f"; did you mean {names[close[0]]}?" if close else ""
