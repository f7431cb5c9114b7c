import pytest

from hf_rmsnorm.cli import common


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """No work is so slow that it says so, however busy the machine."""
    monkeypatch.setattr(common, "A_MINUTE", 1e6)
