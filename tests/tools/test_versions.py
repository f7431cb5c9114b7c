"""scripts/versions.py: the page shows what was kept of each row, and the oldest row is what the package asks for."""

import json
import re

from places import ROOT

from scripts.versions import PAGE, PLACE, RESULTS, ROWS, table


def test_every_row_passed_and_is_on_the_page():
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert [each["row"] for each in results] == [*ROWS]
    assert all(each["passed"] and not each["failures"] for each in results)
    assert all(each["versions"]["transformers"] == each["row"].split("/")[0] for each in results)
    (found,) = PLACE.finditer(PAGE.read_text(encoding="utf-8"))
    assert found[0] == found[1] + table(results) + found[2]


def test_the_package_asks_for_the_oldest_row():
    least = re.search(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    assert ROWS[0].startswith(least + ".")
