"""scripts/trainers.py: every row passed, and the lines of the page are those that were
run.
"""

import json
import re

import pages
from places import ROOT

from scripts import trainers
from scripts.trainers import RESULTS, ROWS, STEPS, TRAINERS

COMMANDS = [
    block.code for block in pages.blocks("sh") if block.page == "docs/training.md"
]


def test_every_row_passed():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert [result["row"] for result in results] == [*ROWS]
    for result in results:
        assert result["passed"] == 4 and not result["failures"]
        assert len(result["losses"]) == STEPS


def test_every_trainer_has_a_row_and_its_command_on_the_page():
    assert [row.split("/")[1] for row in ROWS] == [*TRAINERS]
    for trainer in TRAINERS.values():
        assert trainer.patched + "\n" in COMMANDS
        (file,) = re.findall(r"examples/trainers/\w+\.yaml", trainer.patched)
        assert file in trainer.unpatched
        text = (ROOT / file).read_text(encoding="utf-8")
        assert text.startswith(f"# {trainer.patched}\n")


def test_a_trainer_that_is_not_known_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv", ["trainers.py", "3.11/unheard-of/1.0", "--no-write"]
    )
    assert trainers.main() == 1
    said = capsys.readouterr().out
    assert said.startswith(
        "3.11/unheard-of/1.0: not run: there is no unheard-of among axolotl, ms-swift, llamafactory"
    )
    assert said.count("\n") == 1
