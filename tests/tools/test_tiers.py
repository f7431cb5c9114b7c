"""The tiers of tests/conftest.py: which tests each one runs."""

import os
import shutil

import pytest
from hypothesis import settings
from places import ROOT
from sampling import CASES

pytest_plugins = "pytester"
GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
TESTS = """
import pytest

def test_quick():
    pass

@pytest.mark.parametrize("number", range(20))
def test_cases(number):
    pass

@pytest.mark.full
def test_full():
    pass

@pytest.mark.nightly
def test_nightly():
    pass
"""


@pytest.fixture
def run(pytester):
    """A function of pytest's arguments that returns {test: outcome}."""
    (pytester.path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", pytester.path / "tests")
    shutil.copy(ROOT / "pyproject.toml", pytester.path)
    (pytester.path / "tests" / "test_them.py").write_text(TESTS)
    profile = settings.get_current_profile_name()

    def run(*arguments):
        done = pytester.inline_run("-p", "no:cacheprovider", *arguments)
        outcomes = {}
        for reports in done.listoutcomes():
            for report in reports:
                name = report.nodeid.rpartition("::test_")[2]
                outcomes[name] = report.outcome
        return outcomes

    yield run
    settings.load_profile(profile)


def test_one_case_of_each_quick_test_runs_by_default(run, capsys):
    assert run() == {"quick": "passed", "cases[0]": "passed"}
    output = capsys.readouterr().out
    assert (
        "tier: quick (one case of each test; --all runs more, --nightly everything)"
        in output
    )
    assert "21 deselected" in output


def test_all_runs_the_full_tests_too_and_more_cases(run):
    outcomes = run("--all")
    assert {"quick", "full", "cases[0]", "cases[19]"} <= outcomes.keys()
    assert "nightly" not in outcomes
    assert len(outcomes) == 2 + CASES["all"]


def test_nightly_runs_everything(run):
    cases = {f"cases[{number}]": "passed" for number in range(20)}
    assert run("--nightly") == cases | {
        "quick": "passed",
        "full": "passed",
        "nightly": "passed",
    }


def test_markers_choose_by_themselves(run):
    assert run("-m", "nightly") == {"nightly": "passed"}


@pytest.mark.parametrize(
    "arguments, hidden",
    [
        ([], True),
        (["-m", "not gpu"], True),
        (["-m", "gpu"], False),
        (["-m", "full or gpu"], False),
    ],
)
def test_a_gpu_is_there_for_its_own_tests_alone(run, monkeypatch, arguments, hidden):
    """Others launch kernels on CPU tensors, and so need the interpreter, whatever the
    machine has.
    """
    for name in ("TRITON_INTERPRET", *GPUS):
        monkeypatch.setenv(name, "0")  # as it is after this test
        monkeypatch.delenv(name)
    run(*arguments)
    assert os.environ.get("TRITON_INTERPRET") == ("1" if hidden else None)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == ("" if hidden else None)


def test_a_file_that_is_named_runs_with_its_full_tests(run):
    assert run("tests/test_them.py", "-k", "full or nightly") == {"full": "passed"}
    assert len(run("tests/test_them.py", "-k", "cases")) == 20
    assert run("-k", "full or nightly") == {}
