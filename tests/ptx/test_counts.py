"""What compiled kernels do for a row is no more than the table says, which ``tests/helpers/ptx_counts.py`` wrote."""

import json

import pytest
from ptx_counts import TABLE, TRITON, UNITS, counted

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("driver")]


def test_no_kernel_does_more_for_a_row_than_it_did():
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    assert table["triton"] == TRITON
    found = counted()
    assert found.keys() == table["rows"].keys()
    more = {
        f"{name}: {unit}": (counts[unit], table["rows"][name][unit])
        for name, counts in found.items() for unit in UNITS if counts[unit] > table["rows"][name][unit]
    }  # fmt: skip
    assert not more, "(now, before); where that is meant, write the table anew"
