"""The GPU check's paths, rehearsed where there is no GPU, and the layout of its result files."""

import json
import os
import subprocess
import sys

import pytest
from places import ROOT

from benchmarks.__main__ import main
from benchmarks.gpu_check import gpu_test_files

pytestmark = pytest.mark.full


def gpu_check(*arguments, command="gpu", **environment):
    clean = {k: v for k, v in os.environ.items() if k not in ("OUT", "TRITON_INTERPRET")}
    run = [sys.executable, "-m", "benchmarks", command, *map(str, arguments)]
    return subprocess.run(run, capture_output=True, text=True, env=clean | environment, cwd=ROOT, timeout=400)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """(the finished process, its result) of a whole dry run."""
    folder = tmp_path_factory.mktemp("out")
    done = gpu_check("--dry-run", OUT=str(folder))
    return done, json.loads((folder / "gpu_check.json").read_text())


def test_every_section_passes(rehearsal):
    done, result = rehearsal
    outcome = {name: (s["status"], s.get("reason"), s["failures"]) for name, s in result["sections"].items()}
    assert outcome == dict.fromkeys(("tests", "kernels", "host", "llama", "qwen3"), ("passed", None, []))
    assert done.returncode == 0, done.stderr
    assert result["passed"] is True
    assert result["dry_run"] is True
    assert result["format"] == 2
    assert {"torch", "triton", "transformers", "hf-rmsnorm"} <= result["environment"]["versions"].keys()
    assert {"device", "driver", "commit", "platform"} <= result["environment"].keys()


def test_it_rehearses_the_gpu_tests(rehearsal):
    data = rehearsal[1]["sections"]["tests"]["data"]
    assert data["counts"]["passed"] > 50
    assert data["counts"]["failed"] == 0
    assert all(skip["message"] for skip in data["skipped"])


def test_kernel_cases_are_judged_and_timed(rehearsal):
    data = rehearsal[1]["sections"]["kernels"]["data"]
    assert data["copy_gb_per_s"]["best"] > 0
    assert data["skipped"] == []
    assert [case["kind"] for case in data["cases"]] == ["RMSNorm", "add + RMSNorm", "q/k norm", "LayerNorm"]
    for case in data["cases"]:
        assert {"hf_eager", "hf_rmsnorm"} < case["implementations"].keys()
        ours = case["implementations"]["hf_rmsnorm"]
        outputs = {"q/k norm": {"yq", "yk", "dq", "dk", "dweight1"}, "add + RMSNorm": {"h", "y", "dresidual"}}
        assert outputs.get(case["kind"], {"y", "dx", "dweight"}) <= ours["gate"]["errors"].keys()
        assert ours["gate"]["failures"] == []
        assert ours["gate"]["bit_equal_to_hf"] >= 0.99
        for direction in ("forward", "backward", "forward+backward"):
            assert ours[direction]["wall_us"] > 0


def test_host_cost_and_models_are_measured(rehearsal):
    sections = rehearsal[1]["sections"]
    host = sections["host"]["data"]["cases"]["RMSNorm 1x1x64"]
    assert {"hf_eager", "hf_rmsnorm", "hf_rmsnorm.rms_norm", "F.rms_norm", "F.layer_norm"} <= host.keys()
    for mode in ("inference", "forward", "forward+backward"):
        assert 0 < host["hf_rmsnorm"][mode]["us_min"] <= host["hf_rmsnorm"][mode]["us"]
    for name in ("llama", "qwen3"):
        data = sections[name]["data"]
        assert data["norms_swapped"] == (9 if name == "qwen3" else 5)  # two layers, the final norm
        for phase, unit in (("decode", "tokens_per_s"), ("prefill", "ms"), ("train", "ms")):
            before, after = data["phases"][phase]["unpatched"], data["phases"][phase]["patch_model"]
            assert before[unit] > 0
            assert after["speedup"] > 0
        assert data["phases"]["prefill"]["patch_model"]["max_abs_dlogit"] < 0.1
        assert data["phases"]["train"]["patch_model"]["abs_dloss"] < 0.05


def test_it_prints_tables_and_prints_them_again(rehearsal, tmp_path):
    done, result = rehearsal
    for word in ("DRY RUN", "RMSNorm 6x64", "host us per call", "qwen3-shaped", "speedup"):
        assert word in done.stdout
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(result))
    assert gpu_check(path, command="gpu-report").stdout.strip() in done.stdout


def test_sections_without_time_are_skipped_and_named(tmp_path):
    path = tmp_path / "result.json"
    done = gpu_check("--dry-run", "--budget", "0", "--only", "host,llama", "--out", path)
    sections = json.loads(path.read_text())["sections"]
    assert done.returncode == 0, done.stderr
    assert {s["status"] for s in sections.values()} == {"skipped"}
    assert done.stdout.count("time ran out") == 2


def test_failed_gates_and_exceptions_fail_the_run_but_not_the_other_sections(tmp_path):
    sabotage = tmp_path / "sitecustomize.py"  # runs first in every process: no error is small enough, and no Qwen3
    sabotage.write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\n"
        "from hf_rmsnorm.verification import tolerance\ntolerance.FACTOR = -1e9\n"
        "sys.modules['transformers.models.qwen3.modeling_qwen3'] = None\n"
    )
    path = tmp_path / "result.json"
    done = gpu_check("--dry-run", "--only", "kernels,llama,qwen3", "--out", path, PYTHONPATH=str(tmp_path))
    result = json.loads(path.read_text())
    assert done.returncode == 1
    assert result["passed"] is False
    kernels, llama, qwen3 = (result["sections"][name] for name in ("kernels", "llama", "qwen3"))
    assert kernels["status"] == "failed"
    assert any("y: max error" in failure for failure in kernels["failures"])
    ours = kernels["data"]["cases"][0]["implementations"]["hf_rmsnorm"]
    assert ours["gate"]["failures"] and ours["forward"]["wall_us"] > 0  # marked, its times kept
    assert qwen3["status"] == "error"
    assert "modeling_qwen3" in qwen3["traceback"]
    assert llama["status"] == "passed"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["gpu", "--only", "kernels,nothing"], "no such section: nothing; choose among tests, kernels"),
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


def test_files_without_a_gpu_test_are_not_collected(tmp_path):
    """They may need what an older Transformers lacks, and pytest fails a run for one file that it cannot collect."""
    marks = {"marked": "import pytest\n@pytest.mark.gpu\ndef test(): pass", "all": "from gpu import gpu_tests\n",
             "other": "import no_such_module\ndef test_the_gpu_tests(): pass"}  # fmt: skip
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    for name, text in marks.items():
        (tmp_path / "tests" / "deep" / f"test_{name}.py").write_text(text)
    assert gpu_test_files(tmp_path) == ["tests/deep/test_all.py", "tests/deep/test_marked.py"]


@pytest.mark.full
def test_no_gpu_test_is_left_out_and_none_needs_a_new_transformers(tmp_path):
    """What pytest would choose from all files, and the same with a Transformers that lacks the newest modules."""
    sabotage = "import sys\nsys.modules['transformers.models.muse_spark'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(sabotage)

    def collected(where, **environment):
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--collect-only", *where]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment)
        assert done.returncode == 0, done.stdout[-2000:]
        return [line for line in done.stdout.splitlines() if "::" in line]

    found = collected(gpu_test_files())
    assert len(found) > 100 and sorted(found) == sorted(collected(["tests"]))
    assert collected(gpu_test_files(), PYTHONPATH=str(tmp_path)) == found


def test_without_a_gpu_it_says_so():
    done = gpu_check("--only", "host", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert done.stderr == "python -m benchmarks: error: torch sees no GPU; --dry-run rehearses on the CPU\n"
