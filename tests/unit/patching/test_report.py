"""PatchReport: what it holds, how it prints, what it gives as JSON."""

import dataclasses
import json

import accelerate
import pytest
import tiny_models
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from hf_rmsnorm import NormSpec, PatchReport, patch_model
from hf_rmsnorm.ops import backend as backend_module
from hf_rmsnorm.patching.report import Skipped, Swapped
from hf_rmsnorm.paths import compact_paths
from tests.unit.patching.formula.test_lookalikes import lookalike, no_upcast


@pytest.fixture(scope="module")
def report():
    model = tiny_models.build("qwen3", num_hidden_layers=12)
    return patch_model(model, exclude="model.layers.3.*")


def test_records(report):
    first = report.swapped[0]
    assert (first.path, first.class_name) == ("model.layers.0.self_attn.q_norm", "Qwen3RMSNorm")
    assert first.formula == NormSpec(False, 1e-6, rounding="before_weight")
    assert str(first.formula).startswith("RMSNorm(")
    assert {record.path.split(".")[2] for record in report.skipped} == {"3"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.swapped = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.path = "elsewhere"


def test_layernorm_formula_starts_with_its_name():
    assert str(patch_model(nn.LayerNorm(8)).swapped[0].formula).startswith("LayerNorm(")


def test_to_dict_is_json_with_every_record(report):
    data = json.loads(json.dumps(report.to_dict()))
    assert len(data["swapped"]) == len(report.swapped) == 45
    assert data["swapped"][0]["formula"]["kind"] == "RMSNorm"
    assert data["swapped"][0]["formula"]["eps"] == 1e-6
    assert data["swapped"][0]["formula"]["text"] == str(report.swapped[0].formula)
    assert data["skipped"][0] == dataclasses.asdict(report.skipped[0])


def test_print_is_compact(report):
    text = str(report)
    assert "45 norms swapped, 4 left alone" in text
    assert "model.layers.[0-2,4-11].input_layernorm" in text
    assert "model.layers.3.input_layernorm" in text
    assert "excluded by 'model.layers.3.*'" in text
    assert "fused: + post_attention_layernorm" in text
    assert len(text.splitlines()) == 18


def test_print_of_one_and_none():
    assert "1 norm swapped" in str(patch_model(LlamaRMSNorm(8)))
    assert "(the model itself)" in str(patch_model(LlamaRMSNorm(8)))
    assert str(PatchReport()) == "0 norms swapped, 0 left alone"


@pytest.mark.parametrize(
    ("paths", "compact"),
    [
        ([], []),
        ([""], ["(the model itself)"]),
        (["norm"], ["norm"]),
        (["h.0.ln", "h.1.ln", "h.2.ln"], ["h.[0-2].ln"]),
        (["h.0.ln", "h.2.ln"], ["h.[0,2].ln"]),
        (["h.10.ln", "h.9.ln", "h.9.ln"], ["h.[9-10].ln"]),
        (["0", "1"], ["[0-1]"]),
        (["e.0.f.0", "e.0.f.1", "e.1.f.0", "e.1.f.1"], ["e.[0-1].f.[0-1]"]),
        (["e.0.f.0", "e.0.f.1", "e.1.f.0"], ["e.0.f.[0-1]", "e.1.f.0"]),
        (["stage1.2.n", "stage1.3.n"], ["stage1.[2-3].n"]),
        (["a.{x}.0", "a.{x}.1"], ["a.{x}.[0-1]"]),
    ],
)
def test_compact_paths(paths, compact):
    assert compact_paths(paths) == compact


def test_modules_of_one_formula_are_one_group_whatever_their_classes():
    report = patch_model(nn.ModuleDict({"a": LlamaRMSNorm(8), "b": Qwen2RMSNorm(8), "c": GemmaRMSNorm(8)}))
    assert [(classes, paths) for _, classes, _, paths in report.groups()] == [
        ("LlamaRMSNorm, Qwen2RMSNorm", ["a", "b"]),
        ("GemmaRMSNorm", ["c"]),
    ]


def test_what_was_left_alone_says_what_to_do():
    model = nn.ModuleDict({
        "norm": LlamaRMSNorm(8),
        "batch": type("BatchRMSNorm", (nn.BatchNorm1d,), {})(8),
        "scripted": torch.jit.script(nn.LayerNorm(8)),
        "replaced": LlamaRMSNorm(8),
        "left_out": LlamaRMSNorm(8),
    })  # fmt: skip
    model["replaced"].forward = lambda x: x
    report = patch_model(model, exclude=["left_out"])
    cures = {record.path: record.cure for record in report.skipped}
    assert cures["batch"].startswith("nothing: it is no norm over the last dimension")
    assert cures["scripted"] == "patch the model before torch.jit"
    assert "undo it and patch again" in cures["replaced"]
    assert cures["left_out"] == ""
    assert "what to do: patch the model before torch.jit" in str(report)
    by_path = {record["path"]: record for record in report.to_dict()["skipped"]}
    assert by_path["replaced"]["cure"] == cures["replaced"]


def test_what_is_served_in_part_is_said():
    report = patch_model(lookalike(no_upcast, "Thing"))
    note = "in float32 only: in half precision it rounds in its own order, by its own forward"
    assert note in " ".join(str(report).split())
    assert report.to_dict()["swapped"][0]["notes"] == note


def served(monkeypatch, backend, reason):
    """As on a device of which that is said."""
    monkeypatch.setattr(backend_module, "describe_backend", lambda device: (backend, reason))
    return patch_model(LlamaRMSNorm(8))


def test_it_says_that_nothing_is_fused_where_no_kernel_runs(monkeypatch):
    reason = "Triton has no backend for cpu tensors: patched modules run their own forward"
    report = served(monkeypatch, "original", reason)
    said = f"runs on cpu: {reason}, and nothing is fused, until the model is moved to a GPU"
    assert said in " ".join(str(report).split())
    assert report.to_dict()["devices"] == list(report.devices)
    assert report.to_dict()["devices"][0]["backend"] == "original"


def test_it_says_that_kernels_run(monkeypatch):
    report = served(monkeypatch, "triton", "Triton compiles the kernels for cuda")
    assert str(report).endswith("  runs on    cpu: Triton compiles the kernels for cuda")


def test_it_says_what_converted_norms_run_where_no_kernel_does():
    spec = patch_model(LlamaRMSNorm(8)).swapped[0].formula
    devices = ({"device": "cpu", "backend": "original", "reason": "patched modules run their own forward"},)
    for converted in (True, False):
        report = PatchReport((Swapped("norm", "LayerNorm", spec, converted=converted),), devices=devices)
        said = "own forward (other formulas than their own in plain torch), and nothing is fused"
        assert (said in " ".join(str(report).split())) == converted


def test_a_model_that_accelerate_has_offloaded_runs_where_its_hooks_bring_it(tmp_path):
    model = torch.nn.Sequential(LlamaRMSNorm(8), torch.nn.Linear(8, 8))
    accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [device["device"] for device in patch_model(model).devices] == ["cpu"]


def test_devices_that_are_alike_share_a_line():
    report = PatchReport(
        devices=tuple({"device": f"cuda:{i}", "backend": "triton", "reason": "as they are"} for i in range(2))
    )
    assert str(report).endswith("  runs on    cuda:0, cuda:1: as they are")


def test_a_model_without_data_is_on_no_device():
    assert patch_model(LlamaRMSNorm(8).to("meta")).devices == ()


def test_lines_fit_and_keep_their_paths_whole():
    path = "a" * 60 + "." + "b" * 60
    skipped = Skipped(path, "Odd", "a reason in many words " * 9, "a cure in many words " * 9)
    lines = str(PatchReport(skipped=(skipped,))).splitlines()
    assert "      " + path in lines and len(lines) > 5
    assert all(len(line) <= 100 for line in lines if path not in line)
