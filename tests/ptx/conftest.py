"""Tests of compiled code by itself."""

import os

import pytest

from benchmarks.ptx.driver import NEEDED, RUN_BY


@pytest.fixture
def driver():
    """What executes the launches of this process; it keeps none of them when the test
    is over.
    """
    if os.environ.get(RUN_BY) != "executor":
        pytest.skip(f"`pytest tests/ptx` executes PTX, of {NEEDED}")
    from triton.runtime import driver

    yield driver.active
    driver.active.launches = None
    driver.active.machine.blurred = False
    driver.active.machine.lenient = False
