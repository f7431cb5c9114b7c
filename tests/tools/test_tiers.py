"""The tiers of tests/conftest.py: which tests each one runs."""

import datetime
import json
import os
import re
import shutil

import pytest
from hypothesis import settings
from places import ROOT, SCRIPTS

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
"""


@pytest.fixture
def outside_ci(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import outside_ci

    return outside_ci


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


CASES = [f"cases[{number}]" for number in range(20)]
TIERS = {
    "": ["quick", "cases[0]"],
    "--all": ["quick", *CASES, "full"],
    "-m full": ["full"],
    "-k full": [],
    "tests/test_them.py": ["quick", *CASES, "full"],  # a file that is named
}


@pytest.mark.parametrize("arguments", TIERS)
def test_each_tier_runs_its_tests(arguments, run):
    assert run(*arguments.split()) == dict.fromkeys(TIERS[arguments], "passed")


@pytest.mark.parametrize(
    "mark, hidden",
    [("", True), ("not gpu", True), ("gpu", False), ("full or gpu", False)],
)
def test_a_gpu_is_there_for_its_own_tests_alone(run, monkeypatch, mark, hidden):
    """Others launch kernels on CPU tensors, and so need the interpreter, whatever the
    machine has.
    """
    for name in ("TRITON_INTERPRET", *GPUS):
        monkeypatch.setenv(name, "0")  # as it is after this test
        monkeypatch.delenv(name)
    run("-m", mark)
    assert os.environ.get("TRITON_INTERPRET") == ("1" if hidden else None)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == ("" if hidden else None)


def test_the_last_lines_count_the_outcomes_and_the_reasons(pytester, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import run_tests

    pytester.makepyfile(
        "import pytest\n"
        "def test_a(): pass\n"
        "def test_b(): assert False\n"
        "def test_c(): pytest.skip('no GPU')\n"
        "def test_d(): pytest.skip('no GPU')\n"
    )
    pytester.inline_run("-p", "no:cacheprovider", "--junit-xml=report.xml")
    report = pytester.path / "report.xml"
    lines = run_tests.summary([report, pytester.path / "none.xml"]).splitlines()
    assert lines == ["1 passed, 1 failed, 2 skipped", "  2 skipped: no GPU"]


def test_what_ci_leaves_out_is_listed_with_its_last_run(outside_ci):
    """`.ci/nightly` runs this list alone."""
    nightly = (ROOT / ".ci" / "nightly").read_text(encoding="utf-8")
    commands = [line for line in nightly.splitlines() if line.startswith("python")]
    assert commands == ['python3 scripts/outside_ci.py "$@"']
    committed = json.loads(outside_ci.FILE.read_text(encoding="utf-8"))
    assert committed.keys() == outside_ci.commands().keys()
    text = outside_ci.summary()
    for name, run in committed.items():
        assert f"  {name}: {run['outcome']}" in text
        if run["outcome"] != "never":
            assert datetime.date.fromisoformat(run["date"]) and run["commit"]


def test_each_file_that_it_names_is_there(outside_ci):
    for command in outside_ci.commands().values():
        for word in re.findall(r"[\w.-]+/[\w./-]+", command):
            assert word.startswith(".venv") or (ROOT / word).exists(), command


def test_a_run_is_written_down_with_its_outcome(
    outside_ci, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(outside_ci, "FILE", tmp_path / "outside.json")
    monkeypatch.setattr(outside_ci, "commands", lambda: {"a": "true", "b": "exit 3"})
    monkeypatch.setattr(outside_ci._bootstrap, "ensure", lambda *extras: None)
    monkeypatch.setattr("sys.argv", ["outside_ci.py", "b"])
    assert outside_ci.main() == 1
    assert "  a: never\n  b: failed, exit code 3 20" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["outside_ci.py", "a"])
    assert outside_ci.main() == 0
    outcomes = [run["outcome"] for run in outside_ci.read().values()]
    assert outcomes == ["passed", "failed, exit code 3"]
