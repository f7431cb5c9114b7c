"""`python -m benchmarks`: what it measures and counts without a GPU, its gate, its GPU
paths with stubbed clocks.
"""

import json
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from processes import python

from benchmarks import (
    compact,
    kernels,
    layer_table,
    models,
    peers,
    tables,
    training,
    variants,
)
from benchmarks.__main__ import main
from benchmarks.ptx.driver import NEEDED, reads_ptx
from benchmarks.timing import Stopwatch
from hf_rmsnorm.cli.common import CliError


@pytest.fixture(autouse=True, scope="module")
def no_peers():
    """The same with and without Liger in the environment; its kernels do
    not run in the interpreter.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(sys.modules, "liger_kernel", None)
        yield


def fails(capsys, *arguments):
    try:
        code = main([*arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def host(*arguments):
    """What `host` prints of a few rounds, in a process where Triton compiles."""
    code = "import sys; from benchmarks import __main__, host; host.ROUNDS = 3; sys.exit(__main__.main(sys.argv[1:]))"
    return python("-c", code, "host", "--device", "cpu", *arguments)


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
        return {"us": us}


WRONG = {
    "no weight": {
        "RMSNorm": lambda x, norm: F.rms_norm(x, x.shape[-1:]) + 0 * norm.weight
    },
    "raises": {"RMSNorm": lambda x, norm: x.no_such_method()},
}


@pytest.mark.full
def test_the_gate_refuses_a_wrong_peer_and_marks_its_ratio():
    case = peers.Case("RMSNorm", (4, 64))
    result = kernels.time_case(case, StubbedClock(), torch.bfloat16, WRONG, 100.0)
    entries = result["implementations"]
    assert entries["hf_rmsnorm"]["gate"]["failures"] == []
    assert any("y: max error" in f for f in entries["no weight"]["gate"]["failures"])
    assert "forward" not in entries["raises"]
    shown = "\n".join(tables.kernels({"cases": [result]}))
    assert "NUMERICS DIFFER: y" in shown
    assert f"{entries['no weight']['forward']['times_ours']:.2f}*" in shown
    assert "FAILED: AttributeError" in shown and "no_such_method" in str(entries)


class Turn(SimpleNamespace):
    """A variant that notes its turns, and raises where it fails."""

    @contextmanager
    def of(self, model):
        self.turns.append(self.name)
        if self.name == self.failing:
            raise RuntimeError("no such kernel")
        yield SimpleNamespace(swapped=[])


@pytest.mark.parametrize("failing", [variants.LIGER, variants.BOTH])
def test_the_variants_of_a_model_take_turns_and_a_failing_peer_drops_out(failing):
    """Liger's own failure is named; that it fails together with this package alone
    makes the run fail.
    """
    turns = []
    made = {}
    for name, variant in variants.TIMED.items():
        made[name] = Turn(name=name, turns=turns, failing=failing, **vars(variant))
    prefill = {"ms": 1.0}
    work = SimpleNamespace(sizes={"rounds": 2}, model=None, prefill=lambda: prefill)
    entries = models.measure(work, made, "prefill")
    rest = [name for name in made if name != failing]
    assert turns == [*made, *rest, *rest]
    assert entries[failing] == {"error": "RuntimeError: no such kernel"}
    failures = models.broken_together("prefill", entries)
    assert len(failures) == (failing == variants.BOTH)
    shown = "\n".join(tables.phase("prefill", entries))
    assert "no such kernel" in shown and " to " in shown


def test_training_runs_that_time_does_not_allow_are_named(monkeypatch):
    sizes = training.Sizes(layers=1, steps=3, batch=1, length=4)
    monkeypatch.setattr(training, "REHEARSED", sizes)
    data = {}
    shapes = {"LLaMA": training.TRAINED["LLaMA"]}
    training.run("cpu", rehearsal=True, data=data, shapes=shapes, left=lambda: 0)
    assert list(data["models"]["LLaMA"]) == ["unpatched"]
    assert data["skipped"] == ["LLaMA: patch_model"]


def test_zeros_on_every_side_do_not_pass_the_gate():
    """As where a stand-in for a GPU computes nothing: all would agree."""
    case = peers.Case("RMSNorm", (4, 16))
    norms = peers.make_norms(case, "cpu", torch.float32)
    made = peers.implementations(case, norms, (), {}, None)
    inputs, gradients = peers.make_set(case, "cpu", torch.float32)
    zeros = [torch.zeros_like(x).requires_grad_() for x in inputs]
    verdicts = peers.judge(case, made, norms, zeros, gradients)
    nothing = "y: zero everywhere in float64 too, so nothing was computed"
    assert all(nothing in verdict["failures"] for verdict in verdicts.values())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["layer", "--models", "tiny,GPT-5"], "no such shape: GPT-5; choose among "),
        (["layers"], "invalid choice"),
        (["host", "--device", "cuda:x"], "cuda:x"),
    ],
)
def test_bad_input_gets_one_line(capsys, arguments, message):
    assert message in fails(capsys, *arguments)


def test_a_result_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(CliError, match="cannot write .*; pass another file"):
        compact.write_result(tmp_path / "no/such/folder.json", {})


def layer(*arguments):
    """What `layer` counts, in a process where the kernels are compiled and their PTX is
    executed.
    """
    return json.loads(python("-m", "benchmarks", "layer", "--json", *arguments))


@pytest.fixture
def executed():
    if not reads_ptx():
        pytest.skip(f"executes PTX, of {NEEDED}")
    return layer_table.committed()


def test_a_narrow_layer_launches_what_the_committed_result_says(executed):
    counted = layer("--models", "tiny", "--tokens", "4")["models"]["tiny"]  # a Qwen3
    assert {"eager", "hf_rmsnorm", "hf_rmsnorm_memory_efficient"} <= counted.keys()
    for variant in counted:
        for phase in ("decode", "prefill"):
            for what in ("kernels", "fusible_kernels"):
                assert (
                    counted[variant][phase][what]
                    == executed["models"]["Qwen3-8B"][variant][phase][what]
                )
    kept = {name: counts["saved_bytes_per_token"] for name, counts in counted.items()}
    ours = kept["hf_rmsnorm"]
    assert kept["hf_rmsnorm_memory_efficient"] < ours < kept["eager"]


@pytest.mark.full
def test_a_layer_of_the_published_size_is_counted_as_in_the_committed_result(executed):
    name = "Mistral-7B"
    counted = layer("--models", name)["models"][name]
    for variant, counts in counted.items():
        expected = dict(executed["models"][name][variant])
        # the order in which a CPU adds depends on the CPU
        expected.pop("equal_to_eager")
        assert counts.items() >= expected.items()


def test_the_picture_of_the_speeds_is_that_of_the_committed_results():
    from docs import draw_speeds as drawing

    drawn = drawing.drawn(layer_table.gpu_speeds())
    assert drawn == drawing.FILE.read_text(encoding="utf-8")
