"""The lists of benchmarks/ and scripts/: a row for each command, and no other."""

import datetime
import re

import pages
import pytest
from places import ROOT, SCRIPTS

from benchmarks.__main__ import COMMANDS
from scripts.coverage.__main__ import COMMANDS as COVERAGE


def rows(page: str) -> dict[str, list[str]]:
    """By the command that a row begins with, its other cells."""
    found = re.findall(r"^\| `([\w. -]+)` \|(.*)\|$", pages.PAGES[page], re.MULTILINE)
    return {
        name: [cell.strip() for cell in cells.split(" | ")] for name, cells in found
    }


def scripts() -> set[str]:
    """The commands of scripts/, by which they are listed."""
    found = {f"coverage {command}" for command in COVERAGE}
    for path in SCRIPTS.glob("*.py"):
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
            found.add(path.stem)
    return found


def test_every_command_of_benchmarks_has_a_row():
    assert rows("benchmarks/README.md").keys() == COMMANDS.keys()


def test_every_script_has_a_row():
    listed = {name.removesuffix(".py") for name in rows("scripts/README.md")}
    assert listed == scripts()


@pytest.mark.parametrize("page", ["benchmarks/README.md", "scripts/README.md"])
def test_a_row_says_who_runs_it_when_it_ran_and_what_depends_on_it(page):
    table = rows(page)
    assert 0 < len(table) <= 25
    for name, (use, who, last, dependent) in table.items():
        assert use and who and dependent, name
        assert datetime.date.fromisoformat(last).year >= 2026, name
        if name.endswith(".py"):
            assert (ROOT / "scripts" / name).exists()
