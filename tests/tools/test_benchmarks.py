"""`python -m benchmarks`: what it measures and counts without a GPU, its gate, its GPU
paths with stubbed clocks.
"""

import json
import os
import runpy
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
from places import ROOT
from ptx.driver import TRITON

from benchmarks import (
    compact,
    counting,
    cpu,
    kernels,
    layer_table,
    models,
    peers,
    tables,
    traffic,
)
from benchmarks.__main__ import main
from benchmarks.shapes import TINY
from benchmarks.timing import Stopwatch
from hf_rmsnorm import unpatch_model

ENVELOPE = {
    "format",
    "bench",
    "started",
    "versions",
    "device",
    "driver",
    "platform",
    "commit",
    "dtype",
    "not_measured",
}
MODES = ("inference", "forward", "forward+backward")
PNG = b"\x89PNG\r\n"


@pytest.fixture(autouse=True, scope="module")
def no_peers():
    """The same with and without Liger and Quack in the environment; their kernels do
    not run in the interpreter.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        # What another test has imported of them too: a module that is there is found
        # without its package.
        loaded = [
            name
            for name in sys.modules
            if name.split(".")[0] in ("liger_kernel", "quack")
        ]
        for name in {"liger_kernel", "quack", *loaded}:
            monkeypatch.setitem(sys.modules, name, None)
        yield


def bench(capsys, *arguments):
    assert main([*map(str, arguments), "--device", "cpu", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data.keys() >= ENVELOPE
    assert {"torch", "transformers", "liger-kernel"} <= data["versions"].keys()
    return data


def fails(capsys, *arguments):
    try:
        code = main(
            [
                *map(str, arguments),
                *(("--device", "cpu") if "layer" not in arguments else ()),
            ]
        )
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def host(*arguments):
    """What `host` prints of a few rounds, in a process where Triton compiles."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = "import sys; from benchmarks import __main__, host; host.ROUNDS = 3; sys.exit(__main__.main(sys.argv[1:]))"
    command = [
        sys.executable,
        "-c",
        code,
        "host",
        "--models",
        "tiny",
        "--device",
        "cpu",
        *arguments,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class StubbedClock(Stopwatch):
    """A GPU's clock that runs every call once, and counts instead of measuring."""

    def __init__(self):
        super().__init__("cpu")
        self.cuda, self.ticks = True, 0

    def sync(self):
        pass

    def device_us(self, calls):
        for call in calls[:2]:
            call()
        self.ticks += 1
        us = 10.0 + self.ticks % 3
        return {"us": us, "us_p20": us, "us_p80": us}

    def wall_us(self, calls):
        return 1.0


@pytest.mark.full
def test_kernels_on_a_cpu_are_judged_and_not_timed(capsys):
    data = bench(capsys, "kernels", "--models", "tiny", "--tokens", 3)
    assert [case["case"] for case in data["cases"]] == [
        "RMSNorm 3x64", "add + RMSNorm 3x64", "q/k norm 1x3x4x2x16",
        "q/k norm + rotary 1x3x4x2x16",
    ]  # fmt: skip
    assert data["copy_gb_per_s"] is None and "need a GPU" in data["not_measured"][0]
    for case in data["cases"]:
        entries = case["implementations"]
        assert {"hf_eager", "hf_rmsnorm", "F.rms_norm"} <= entries.keys()
        ours = entries["hf_rmsnorm"]
        assert ours["gate"]["failures"] == [] and ours["gate"]["bit_equal_to_hf"] == 1.0
        assert ours["saved_bytes_per_row"] < entries["hf_eager"]["saved_bytes_per_row"]
        assert not any(
            mode in entry
            for entry in entries.values()
            for mode in ("forward", "backward")
        )


@pytest.mark.full
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_gate_refuses_a_wrong_peer_and_marks_its_ratio(offset):
    wrong = {
        "no weight": {
            "RMSNorm": lambda x, norm: (
                x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) + 0 * norm.weight
            )
        },
        "raises": {"RMSNorm": lambda x, norm: x.no_such_method()},
    }
    case = peers.Case("RMSNorm", (4, 64), offset)
    result = kernels.time_case(case, StubbedClock(), torch.bfloat16, wrong, 100.0)
    entries = result["implementations"]
    assert any(
        "y: max error" in failure
        for failure in entries["no weight"]["gate"]["failures"]
    )
    assert (
        "no_such_method" in entries["raises"]["gate"]["failures"][0]
        and "forward" not in entries["raises"]
    )
    assert entries["hf_rmsnorm"]["gate"]["failures"] == []
    # without offset it rounds otherwise
    rival = entries["F.rms_norm"]["forward"]["times_ours"] if offset else None
    assert entries["hf_rmsnorm"]["forward"]["of_best_with_same_numerics"] == rival
    lines = "\n".join(tables.kernels({"cases": [result]})).splitlines()
    (line,) = (line for line in lines if "no weight" in line)
    assert (
        "NUMERICS DIFFER: y" in line
        and f"{entries['no weight']['forward']['times_ours']:.2f}*" in line
    )
    assert any("raises" in line and "FAILED: AttributeError" in line for line in lines)


@pytest.mark.full
@pytest.mark.parametrize("phase, unit", [("decode", "tokens_per_s"), ("train", "ms")])
def test_models_before_and_after(phase, unit):
    sizes = {
        "prompt": 4,
        "new_tokens": 3,
        "prefill": 6,
        "batch": 1,
        "length": 5,
        "rounds": 1,
    }
    found = models.run(TINY, phase, sizes, 2, "cpu", torch.bfloat16)
    variants = found["tiny"]["phases"][phase]
    assert variants["unpatched"][unit] > 0 and variants["patch_model"]["speedup"] > 0
    assert found["tiny"]["norms_swapped"] == 9 and found["tiny"]["layers"] == 2
    result = {
        "bench": "train",
        "device": None,
        "versions": {},
        "layers": {},
        "not_measured": [],
    }
    assert "patch_model" in tables.text({**result, "phase": phase, "models": found})


@pytest.mark.full
@pytest.mark.parametrize("what", ["generate", "train"])
def test_on_a_cpu_models_are_counted(capsys, what):
    data = bench(capsys, what, "--models", "tiny")
    before, after = (
        data["layers"]["tiny"]["unpatched"],
        data["layers"]["tiny"]["patched"],
    )
    assert before["sum"] == 56 and before["launches"] == 0
    assert after["sum"] == after["operators"] + after["launches"] <= 26
    saved = before["saved_bytes_per_token"] - after["saved_bytes_per_token"]
    assert saved == 2 * 4 * 64 + 6 * 4 * 16, (
        "xhat in half and x in single precision, of two norms and six heads"
    )
    assert data["models"] == {} and "before and after" in data["not_measured"][0]


def test_zeros_on_every_side_do_not_pass_the_gate():
    """As where a stand-in for a GPU computes nothing: all would agree."""
    case = peers.Case("RMSNorm", (4, 16))
    norms = peers.make_norms(case, "cpu", torch.float32)
    made = peers.implementations(case, norms, {}, None)
    inputs, gradients = peers.make_set(case, "cpu", torch.float32)
    verdicts = peers.judge(case, made, norms, inputs, gradients)
    assert list(verdicts) == [
        "hf_eager",
        "hf_rmsnorm",
        "hf_rmsnorm again",
        "F.rms_norm",
    ]
    assert not any(verdict["failures"] for verdict in verdicts.values())
    zeros = [torch.zeros_like(x).requires_grad_() for x in inputs]
    for verdict in peers.judge(case, made, norms, zeros, gradients).values():
        assert (
            "y: zero everywhere in float64 too, so nothing was computed"
            in verdict["failures"]
        )


@pytest.mark.nightly
def test_host_costs_on_a_cpu(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    out, picture = tmp_path / "host.json", tmp_path / "host.png"
    printed = json.loads(host("--json", "--out", str(out), "--plot", str(picture)))
    assert out.read_text() == compact.compact_json(printed) + "\n"
    assert picture.read_bytes().startswith(PNG)
    assert printed.keys() >= ENVELOPE
    assert list(printed["cases"]) == [
        "RMSNorm 1x1x64",
        "add + RMSNorm 1x1x64",
        "q/k norm 1x1x4x2x64",
    ]
    for case, entries in printed["cases"].items():
        for mode in MODES:
            assert (
                0
                < entries["hf_rmsnorm"][mode]["us_min"]
                <= entries["hf_rmsnorm"][mode]["us"]
            )
        # Besides allocations and the launch, only the sum: of one token it is left to
        # torch.
        assert entries["hf_rmsnorm"]["operators"] == (
            1 if case.startswith("add") else 0
        )
        assert entries["hf_eager"]["operators"] >= 8
    assert printed["ratios"]["inference / F.rms_norm"] > 0
    assert printed["decoding"].keys() == {"LLaMA", "Qwen3"}
    for figures in printed["decoding"].values():
        assert list(figures) == ["unpatched", "norms alone", "patched"]
    known = "liger" in printed["cases"]["RMSNorm 1x1x64"]
    assert (printed["ratios"]["forward+backward / Liger"] is None) is not known
    assert "not launched" in printed["not_measured"][0]


@pytest.mark.full
def test_host_costs_are_not_taken_from_the_interpreter(capsys, monkeypatch):
    data = bench(capsys, "host", "--models", "tiny")
    assert data["cases"] == {} and data["ratios"] == {}
    assert "TRITON_INTERPRET=1" in data["not_measured"][0]
    assert data["layers"]["tiny"]["unpatched"]["sum"] == 56
    assert "TRITON_INTERPRET=1" in fails(
        capsys, "host", "--models", "tiny", "--plot", "x.png"
    )


def test_what_needs_a_gpu_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert main(["kernels"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert "error: kernels needs a GPU, and torch sees none here: --device cpu " in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["kernels", "--models", "tiny,GPT-5"],
            "no such shape: GPT-5; choose among Llama-3-8B",
        ),
        (["kernels", "--tokens", "4,0"], "0 is below 1"),
        (["layer", "--table", "--models", "tiny"], "the committed result has no tiny"),
        (["kernals"], "invalid choice"),
        (
            ["train", "--models", "tiny", "--out", "no/such/folder/x.json"],
            "cannot write no/such/folder/x.json",
        ),
    ],
)
def test_bad_input_gets_one_line(capsys, arguments, message):
    assert message in fails(capsys, *arguments)


@pytest.mark.nightly
def test_the_cost_of_a_patch_on_a_cpu_is_a_ratio_beside_that_of_chance():
    model = counting.build(TINY["tiny"], 1, "cpu", torch.float32).eval()
    found = cpu.measure(model, 5)
    assert found["turns"] == 5 and found["parameters"] == sum(
        p.numel() for p in model.parameters()
    )
    assert all(
        0 < found[kind]["us_min"] <= found[kind]["us"]
        for kind in (cpu.PLAIN, cpu.PATCHED, cpu.AGAIN)
    )
    assert (
        found["ratio"] > 0
        and found["ratio by chance"] > 0
        and unpatch_model(model) == 0
    )


def test_a_committed_result_has_an_entry_a_line_and_five_digits():
    value = {
        "name": "x",
        "of": {str(n): {"us": 1 / 3 + n, "of": [n] * 200} for n in range(3)},
        "none": [],
    }
    text = compact.compact_json(value)
    assert json.loads(text)["of"]["2"] == {"us": 2.3333, "of": [2] * 200}
    assert [line.strip()[:4] for line in text.splitlines()] == [
        "{",
        '"nam',
        '"of"',
        '"0":',
        '"1":',
        '"2":',
        "},",
        '"non',
        "}",
    ]


# --- one decoder layer
# -------------------------------------------------------------------------------------------


def layer(*arguments):
    """What `layer` counts, in a process where the kernels are compiled and their PTX is
    executed.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks", "layer", "--json", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def executed():
    if version("triton") != TRITON:
        pytest.skip(f"executes the PTX of Triton {TRITON}")
    return layer_table.committed()


def test_a_narrow_layer_launches_what_the_committed_result_says(executed):
    counted = layer("--models", "tiny", "--tokens", "4")["models"]["tiny"]  # a Qwen3
    for variant in ("eager", "hf_rmsnorm"):
        for phase in ("decode", "prefill"):
            for what in ("kernels", "fusible_kernels"):
                assert (
                    counted[variant][phase][what]
                    == executed["models"]["Qwen3-8B"][variant][phase][what]
                )
    assert (
        counted["hf_rmsnorm"]["saved_bytes_per_token"]
        < counted["eager"]["saved_bytes_per_token"]
    )


@pytest.mark.nightly
def test_a_layer_of_the_published_size_is_counted_as_in_the_committed_result(executed):
    name = "Mistral-7B"
    counted = layer("--models", name)["models"][name]
    for variant, counts in counted.items():
        expected = dict(executed["models"][name][variant])
        # the order in which a CPU adds depends on the CPU
        expected.pop("equal_to_eager")
        assert counts.items() >= expected.items()


def test_bytes_that_elements_share_are_counted_once():
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert traffic.distinct_bytes(x) == 64
    assert traffic.distinct_bytes(x[:1].expand(4, 8)) == 16
    assert traffic.distinct_bytes(x[:, :2]) == 16


class _Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return x + self.mlp(self.norm(x)).view(-1, 8)


def test_norms_and_sums_are_told_from_the_rest_of_a_layer():
    module, x = _Layer(), torch.zeros(4, 8)
    with torch.no_grad(), traffic.Traffic(module) as counted:
        module(x)
    assert counted.kernels == 3, (
        "the norm, the matrix product and the sum; the view is free"
    )
    norm = 2 * 4 * 32 + 2 * 32 + 2 * 4 * 4  # x, y, weight and bias, mean and rstd
    assert counted.fusible == {"kernels": 2, "bytes": norm + 3 * 4 * 32}


def test_the_picture_of_a_layer_is_that_of_the_committed_result():
    path = ROOT / "docs/draw_layer.py"
    drawing = runpy.run_path(str(path))
    assert drawing["drawn"](layer_table.committed()["models"]) == drawing[
        "FILE"
    ].read_text(encoding="utf-8")


def test_the_table_of_a_layer_has_the_speeds_of_a_gpu():
    speeds, device = layer_table.gpu_speeds()
    lines = layer_table.models_table(layer_table.committed())
    assert device in lines[-1]
    ours = speeds["Qwen3-8B"]["hf_rmsnorm"]
    (row,) = (line for line in lines if line.startswith("| Qwen3-8B, hf-rmsnorm |"))
    assert row.endswith(f"| {' | '.join(ours)} |") and float(ours[0]) > 1
