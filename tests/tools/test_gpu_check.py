"""The GPU check's paths, rehearsed where there is no GPU, and the layout of its result
files.
"""

import json
import sys
import time

import pytest
from places import SCRIPTS
from processes import ran

from benchmarks import gpu_check as gpu_check_module
from benchmarks.__main__ import main

# llama runs what qwen3 does, on norms that qwen3 has too.
REHEARSED = ("tests", "kernels", "host", "qwen3", "train")


def gpu_check(*arguments, command="gpu", **environment):
    return ran(sys.executable, "-m", "benchmarks", command, *arguments, **environment)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """(the finished process, its result) of a dry run."""
    folder = tmp_path_factory.mktemp("out")
    done = gpu_check("--dry-run", "--only", ",".join(REHEARSED), OUT=str(folder))
    return done, json.loads((folder / "gpu_check.json").read_text())


@pytest.mark.full
def test_every_section_passes(rehearsal):
    done, result = rehearsal
    for name in REHEARSED:
        section = result["sections"][name]
        assert section["status"] == "passed" and not section["failures"], name
    for entries in result["sections"]["train"]["data"]["models"].values():
        assert entries["patch_model"]["max_abs_dloss"] < 0.01
    assert done.returncode == 0, done.stderr
    assert result["passed"] and result["dry_run"] and result["format"] == 2
    assert {"device", "driver", "commit", "platform"} <= result["environment"].keys()


@pytest.mark.full
def test_it_prints_tables_and_prints_them_again(rehearsal, tmp_path):
    done, result = rehearsal
    for word in (
        "DRY RUN",
        "RMSNorm 6x64",
        "host us per call",
        "qwen3-shaped",
        "x unpatched",
        "Qwen3, trained",
    ):
        assert word in done.stdout
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(result))
    picture = tmp_path / "losses.png"
    report = gpu_check(path, "--plot", picture, command="gpu-report")
    assert report.stdout.strip() in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


RESULTS = sorted((SCRIPTS / "results").glob("nvidia-*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_committed_result_can_be_printed(capsys, path):
    assert main(["gpu-report", str(path)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["environment"]["device"] in printed
    for case in result["sections"]["kernels"]["data"]["cases"]:
        assert case["case"] in printed
    for case in result["sections"]["host"]["data"]["cases"]:
        assert case in printed


@pytest.mark.parametrize(
    "body, reason, traceback",
    [
        (
            "raise RuntimeError('no such GPU')",
            "RuntimeError: no such GPU",
            "import torch",
        ),
        ("import os; os._exit(139)", "the process ended with code 139", ""),
        ("import signal; signal.pause()", "did not end in its time and was ended", ""),
    ],
    ids=["raises", "crashes", "hangs"],
)
def test_a_section_that_does_not_end_well_is_an_error_with_the_reason(
    tmp_path, monkeypatch, body, reason, traceback
):
    (tmp_path / "torch.py").write_text(body)  # what a section imports first
    monkeypatch.syspath_prepend(str(tmp_path))
    now = time.monotonic()
    result = gpu_check_module.supervise(
        "kernels", tmp_path, True, now + 1, now + (1 if "pause" in body else 3600)
    )
    assert (result["status"], result["reason"]) == ("error", reason)
    assert traceback in result.get("traceback", "")


@pytest.mark.parametrize(
    "bad, code", [({}, 0), ({"kernels": "failed"}, 1), ({"qwen3": "error"}, 1)]
)
def test_a_bad_section_fails_the_run_but_not_the_other_sections(
    capsys, tmp_path, monkeypatch, bad, code
):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which the run sets
    monkeypatch.delenv("OUT", raising=False)
    asked = []

    def supervise(name, *args):
        asked.append(name)
        status = bad.get(name, "passed")
        data = {"device": None, "driver": None, "versions": {}}
        return {"status": status, "reason": "a test", "data": data, "failures": []}

    monkeypatch.setattr(gpu_check_module, "supervise", supervise)
    assert main(["gpu", "--dry-run", "--out", str(tmp_path / "result.json")]) == code
    assert asked == ["environment", *gpu_check_module.SECTIONS]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["passed"] == (not bad)
    printed = capsys.readouterr().out
    assert all(status in printed for status in bad.values())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["gpu", "--only", "kernels,nothing"],
            "no such section: nothing; choose among tests, kernels",
        ),
        (["gpu", "--budget", "long"], "invalid float value"),
        (["gpu-report", "missing.json"], "missing.json"),
        (["gpu-report", str(RESULTS[0]), "--plot", "x.png"], "has no training runs"),
    ],
)
def test_bad_arguments_get_one_line(capsys, arguments, message):
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which the run sets
    assert main(["gpu", "--only", "host"]) == 2
    said = "error: torch sees no GPU; --dry-run rehearses on the CPU\n"
    assert capsys.readouterr().err == f"python -m benchmarks: {said}"
