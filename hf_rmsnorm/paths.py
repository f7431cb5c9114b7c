"""Text for people: module paths that differ in their numbers written as one, lines that
fit, a word that is meant, an error on one line.
"""

import difflib
import textwrap
from collections.abc import Iterable, Sequence


def fitted(text: str, hang: int = 4) -> str:
    """The text in 100 columns: a longer line continues below, `hang` columns further
    in, and no path is broken.
    """
    lines = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if " " in line.strip():
            line = textwrap.fill(
                line,
                100,
                subsequent_indent=" " * (indent + hang),
                break_long_words=False,
                break_on_hyphens=False,
            )
        lines.append(line)
    return "\n".join(lines)


def compact_paths(paths: Sequence[str]) -> list[str]:
    """Paths that differ in their numbers written as one,
    ``model.layers.[0-31].input_layernorm``.
    """
    rows = [tuple(path.split(".")) for path in dict.fromkeys(paths)]
    for place in reversed(range(max(map(len, rows), default=0))):
        rows = _joined(rows, place)
    return [".".join(row) or "(the model itself)" for row in rows]


def _joined(rows: list[tuple], place: int) -> list[tuple]:
    """Rows that differ in their number at one place, written as one."""
    alike: dict[tuple, list[int]] = {}
    for row in rows:
        if len(row) > place and row[place].isdecimal():
            rest = (*row[:place], None, *row[place + 1 :])
            alike.setdefault(rest, []).append(int(row[place]))
        else:
            alike[row] = []
    joined = []
    for row, numbers in alike.items():
        if numbers:
            row = (*row[:place], _ranges(sorted(numbers)), *row[place + 1 :])
        joined.append(row)
    return joined


def _ranges(numbers: list[int]) -> str:
    """One number, or ascending ones as ``[0-2,5]``."""
    if len(numbers) == 1:
        return str(numbers[0])
    ranges = []
    last = None
    for number in numbers:
        if ranges and number == last + 1:
            first, _, _ = ranges[-1].partition("-")
            ranges[-1] = f"{first}-{number}"
        else:
            ranges.append(str(number))
        last = number
    text = ",".join(ranges)
    return f"[{text}]"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """What to add to an error about a word: the known one that is like it, if there is
    any.
    """
    close = difflib.get_close_matches(word.lower(), known, 1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def error_line(error: BaseException, limit: int = 200) -> str:
    """An error on one line: its type and its message, cut at limit characters."""
    text = textwrap.shorten(str(error), limit, placeholder="...")
    return f"{type(error).__name__}: {text}"
