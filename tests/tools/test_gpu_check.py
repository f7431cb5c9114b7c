"""The GPU check's paths, rehearsed where there is no GPU, and the layout of its result
files.
"""

import json
import os
import subprocess
import sys
import time

import pytest
from places import ROOT

from benchmarks import gpu_bench
from benchmarks import gpu_check as gpu_check_module
from benchmarks.__main__ import main
from hf_rmsnorm.verification import tolerance

# llama runs what qwen3 does, on norms that qwen3 has too.
REHEARSED = ("tests", "kernels", "host", "qwen3")
nightly = pytest.mark.nightly


def gpu_check(*arguments, command="gpu", **environment):
    clean = {
        k: v for k, v in os.environ.items() if k not in ("OUT", "TRITON_INTERPRET")
    }
    run = [sys.executable, "-m", "benchmarks", command, *map(str, arguments)]
    return subprocess.run(
        run,
        capture_output=True,
        text=True,
        env=clean | environment,
        cwd=ROOT,
        timeout=400,
    )


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """(the finished process, its result) of a dry run."""
    folder = tmp_path_factory.mktemp("out")
    done = gpu_check("--dry-run", "--only", ",".join(REHEARSED), OUT=str(folder))
    return done, json.loads((folder / "gpu_check.json").read_text())


@nightly
def test_every_section_passes(rehearsal):
    done, result = rehearsal
    outcome = {
        name: (s["status"], s.get("reason"), s["failures"])
        for name, s in result["sections"].items()
    }
    assert outcome == dict.fromkeys(REHEARSED, ("passed", None, []))
    assert done.returncode == 0, done.stderr
    assert result["passed"] is True
    assert result["dry_run"] is True
    assert result["format"] == 2
    assert {"torch", "triton", "transformers", "hf-rmsnorm"} <= result["environment"][
        "versions"
    ].keys()
    assert {"device", "driver", "commit", "platform"} <= result["environment"].keys()


@nightly
def test_it_prints_tables_and_prints_them_again(rehearsal, tmp_path):
    done, result = rehearsal
    for word in (
        "DRY RUN",
        "RMSNorm 6x64",
        "host us per call",
        "qwen3-shaped",
        "speedup",
    ):
        assert word in done.stdout
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(result))
    assert gpu_check(path, command="gpu-report").stdout.strip() in done.stdout


@pytest.mark.full
def test_a_failed_gate_keeps_its_times_and_fails_the_section(tmp_path, monkeypatch):
    monkeypatch.setattr(tolerance, "FACTOR", -1e9)  # no error is small enough
    monkeypatch.setattr(gpu_bench, "other_libraries", lambda: ({}, {}))
    monkeypatch.setattr(gpu_bench, "DRY_CASES", gpu_bench.DRY_CASES[-1:])
    section = gpu_check_module.Section(
        tmp_path / "kernels.json", True, time.monotonic() + 600
    )
    gpu_bench.run("kernels", section)
    assert any("y: max error" in failure for failure in section.failures)
    ours = section.data["cases"][0]["implementations"]["hf_rmsnorm"]
    assert ours["gate"]["failures"] and ours["forward"]["wall_us"] > 0
    assert json.loads(section.path.read_text())["failures"] == section.failures


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
        "kernels", tmp_path, True, now + 1, now + (1 if "pause" in body else 60)
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
        data = (
            {"device": None, "driver": None, "versions": {}}
            if name == "environment"
            else {}
        )
        status = bad.get(name, "passed")
        return {
            "status": status,
            "reason": "of a test",
            "data": data,
            "failures": [name] if status == "failed" else [],
        }

    monkeypatch.setattr(gpu_check_module, "supervise", supervise)
    assert main(["gpu", "--dry-run", "--out", str(tmp_path / "result.json")]) == code
    assert asked == ["environment", *gpu_check_module.SECTIONS]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["passed"] == (not bad) and all(
        s["status"] != "not run yet" for s in result["sections"].values()
    )
    assert all(status in capsys.readouterr().out for status in bad.values())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["gpu", "--only", "kernels,nothing"],
            "no such section: nothing; choose among tests, kernels",
        ),
        (["gpu", "--budget", "long"], "invalid float value"),
        (["gpu-report", "missing.json"], "missing.json"),
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


def test_without_a_gpu_it_says_so():
    done = gpu_check("--only", "host", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert (
        done.stderr
        == "python -m benchmarks: error: torch sees no GPU; --dry-run rehearses on the CPU\n"
    )
