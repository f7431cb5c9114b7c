import json
import os
from unittest import mock

import pytest

from hf_rmsnorm.cli import common
from hf_rmsnorm.cli.main import main


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """No work is so slow that it says so, however busy the machine."""
    monkeypatch.setattr(common, "A_MINUTE", 1e6)


@pytest.fixture(autouse=True)
def own_environment():
    """What the command line sets for its own process ends with the test."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def run(capsys):
    """`hf-rmsnorm` with these words in this process: (exit code, stdout, stderr)."""

    def run_words(*words) -> tuple[int, str, str]:
        try:
            code = main(list(map(str, words)))
        except SystemExit as stop:  # how argparse leaves
            code = stop.code
        return code, *capsys.readouterr()

    return run_words


@pytest.fixture
def run_json(run):
    """The object that `hf-rmsnorm` prints for these words."""

    def run_words(*words) -> dict:
        code, out, err = run(*words, "--json")
        assert code == 0, err
        return json.loads(out)

    return run_words


@pytest.fixture
def fails(run):
    """The one line on stderr that these words end in."""

    def run_words(*words) -> str:
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert err.startswith("hf-rmsnorm") and err.endswith("\n")
        assert err.count("\n") == 1 and "Traceback" not in err
        return err

    return run_words
