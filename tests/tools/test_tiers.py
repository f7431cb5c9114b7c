"""The tiers of tests/conftest.py: what each runs, and what fails a quick test."""

import os
import shutil

import pytest
from hypothesis import settings
from places import ROOT

pytest_plugins = "pytester"
COSTLY = """
import time

end = time.process_time() + 0.2
while time.process_time() < end:
    pass
"""
TESTS = """
import subprocess, sys, time
import pytest

def spend(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

@pytest.fixture(scope="module")
def shared():
    spend(0.2)

@pytest.fixture
def own():
    spend(0.2)

def test_quick():
    pass

def test_slow():
    spend(0.2)

def test_slow_setup(own):
    pass

def test_slow_child():
    subprocess.run([sys.executable, "-S", "-c", "import time\\nwhile time.process_time() < 0.2: pass"])

def test_shared(shared):
    pass

def test_import():
    import costly

def test_waits():
    time.sleep(0.2)

@pytest.mark.full
def test_full():
    spend(0.2)

@pytest.mark.nightly
def test_nightly():
    pass
"""
QUICK = {"quick", "slow", "slow_setup", "slow_child", "shared", "import", "waits"}
SLOW = {"slow", "slow_setup", "slow_child"}


@pytest.fixture
def run(pytester, monkeypatch):
    """A function of pytest's arguments: ({test: outcome}, lines), where a quick test has 0.1 CPU seconds."""
    (pytester.path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", pytester.path / "tests")
    shutil.copy(ROOT / "pyproject.toml", pytester.path)
    (pytester.path / "tests" / "test_them.py").write_text(TESTS)
    (pytester.path / "costly.py").write_text(COSTLY)
    profile = settings.get_current_profile_name()

    def run(*arguments):
        with monkeypatch.context() as patch:  # which is not for this test itself
            patch.setenv("HF_RMSNORM_QUICK_SECONDS", "0.1")
            done = pytester.inline_run("-p", "no:cacheprovider", *arguments)
        outcomes = {}
        for outcome, reports in zip(("passed", "skipped", "failed"), done.listoutcomes(), strict=True):
            outcomes |= {report.nodeid.rpartition("::test_")[2]: outcome for report in reports}
        return outcomes

    yield run
    settings.load_profile(profile)


def test_the_quick_tests_run_and_those_that_cost_more_fail_naming_the_marker(run, capsys):
    assert run() == {name: "failed" if name in SLOW else "passed" for name in QUICK}
    said = capsys.readouterr().out
    assert said.count("a quick test may take 0.1: make it cheaper or mark it @pytest.mark.full") >= len(SLOW)
    assert "tier: quick (--all runs the full tests too, --nightly the long ones)" in said and "2 deselected" in said
    assert " CPU seconds in tests and their fixtures" in said


def test_all_runs_the_full_tests_too_and_fails_none_for_its_time(run):
    assert run("--all") == dict.fromkeys(QUICK | {"full"}, "passed")


@pytest.mark.parametrize("arguments", [["--nightly"], ["-m", "nightly"]])
def test_nightly_tests_run_alone(run, arguments):
    assert run(*arguments) == {"nightly": "passed"}


@pytest.mark.parametrize(
    "arguments, hidden",
    [([], True), (["-m", "not gpu"], True), (["-m", "gpu"], False), (["-m", "full or gpu"], False)],
)
def test_a_gpu_is_there_for_its_own_tests_alone(run, monkeypatch, arguments, hidden):
    """Others launch kernels on CPU tensors, and so need the interpreter, whatever the machine has."""
    for name in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        monkeypatch.setenv(name, "0")  # as it is after this test
        monkeypatch.delenv(name)
    run(*arguments)
    assert os.environ.get("TRITON_INTERPRET") == ("1" if hidden else None)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == ("" if hidden else None)


def test_a_file_that_is_named_runs_with_its_full_tests(run):
    assert run("tests/test_them.py", "-k", "full or nightly") == {"full": "passed"}
    assert run("-k", "full or nightly") == {}
