"""scripts/mutants: what it changes, which tests it runs, and that what it is told of survivors is of today."""

import ast
import json
from collections import Counter

import pytest
from places import ROOT

from scripts.mutants.changes import changes, known, mutants_of
from scripts.mutants.lines import ROOMS, covering


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("if a and b: pass", ["not (a and b)", "b", "a"]),
        ("x = a < 3", ["a <= 3", "4"]),
        ("x = a is None", ["a is not None"]),
        ("y = 1.5 if p else 0", ["not p", "3.0", "1"]),
        (
            "key = x.shape, x.stride(), x.dtype",
            ["(x.stride(), x.dtype)", "(x.shape, x.dtype)", "(x.shape, x.stride())"],
        ),
        ("raise ValueError(f'{a + 1} is more than {b if c else d}')", []),
    ],
)
def test_each_kind_of_change(source, expected):
    made = [ast.unparse(ast.fix_missing_locations(instead)) for _, instead, _ in changes(ast.parse(source))]
    assert Counter(made) == Counter(expected)


def test_a_mutant_is_the_file_with_one_change():
    path = "hf_rmsnorm/ops/direct.py"
    before = (ROOT / path).read_text(encoding="utf-8")
    for mutant, text in mutants_of(path):
        ast.parse(text)
        assert text != before and before.splitlines()[mutant.line - 1].strip() == mutant.code


def test_the_quickest_tests_of_a_line_come_first_and_those_of_each_function_in_turn():
    mutant, _ = mutants_of("hf_rmsnorm/ops/direct.py")[0]
    seconds = {"t.py::a[1]": 1.0, "t.py::a[2]": 2.0, "t.py::b": 3.0, "t.py::c": 0.5}
    lines = {"seconds": seconds, "tests": {f"{mutant.path}:{mutant.line}": [*seconds]}}
    assert covering(mutant, lines, 3) == ["t.py::c", "t.py::a[1]", "t.py::b"]


def test_each_reason_is_of_a_mutant_that_there_is():
    files = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / "hf_rmsnorm" / room).glob("*.py")]
    names = {mutant.name for path in files for mutant, _ in mutants_of(str(path))}
    assert set(known()) <= names, set(known()) - names


def test_the_table_that_is_kept_has_no_survivor_without_a_reason():
    table = json.loads((ROOT / "scripts/results/mutants.json").read_text(encoding="utf-8"))
    rooms = Counter(row["path"].split("/")[1] for row in table)
    assert len(table) >= 300 and min(rooms[room] for room in ROOMS) >= 40
    assert [row for row in table if not row["noticed"] and not row["reason"]] == []
    assert all(row["by"] for row in table if row["noticed"])
