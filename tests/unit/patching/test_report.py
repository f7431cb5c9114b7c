"""PatchReport: what it holds, how it prints, what it gives as JSON."""

import dataclasses
import json

import accelerate
import pytest
import tiny_models
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import NormSpec, patch_model


@pytest.fixture(scope="module")
def report():
    model = tiny_models.build("qwen3", num_hidden_layers=12)
    return patch_model(model, exclude="model.layers.3.*")


def test_records(report):
    first = report.swapped[0]
    assert (first.path, first.class_name) == (
        "model.layers.0.self_attn.q_norm",
        "Qwen3RMSNorm",
    )
    assert first.formula == NormSpec(False, 1e-6, rounding="before_weight")
    assert str(first.formula).startswith("RMSNorm(")
    assert {record.path.split(".")[2] for record in report.skipped} == {"3"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.swapped = ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.path = "elsewhere"


def test_to_dict_is_json_with_every_record(report):
    data = json.loads(json.dumps(report.to_dict()))
    assert len(data["swapped"]) == len(report.swapped) == 45
    assert data["swapped"][0]["formula"]["kind"] == "RMSNorm"
    assert data["swapped"][0]["formula"]["eps"] == 1e-6
    assert data["swapped"][0]["formula"]["text"] == str(report.swapped[0].formula)
    assert data["skipped"][0] == dataclasses.asdict(report.skipped[0])


def test_print_is_compact(report):
    text = str(report)
    assert "45 norms swapped, 4 skipped" in text
    assert "model.layers.[0-2,4-11].input_layernorm" in text
    assert "model.layers.3.input_layernorm" in text
    assert "excluded by 'model.layers.3.*'" in text
    assert "residual add + post_attention_layernorm" in text
    assert "torch.compile traces the model's own code" in text
    assert len(text.splitlines()) == 18


def test_what_was_skipped_says_what_to_do():
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
    assert cures["batch"].startswith("nothing breaks, it runs its own forward")
    assert cures["scripted"] == "patch the model before torch.jit"
    assert "undo it and patch again" in cures["replaced"]
    assert cures["left_out"] == ""
    assert "what to do: patch the model before torch.jit" in str(report)
    by_path = {record["path"]: record for record in report.to_dict()["skipped"]}
    assert by_path["replaced"]["cure"] == cures["replaced"]


def test_a_model_that_accelerate_has_offloaded_runs_where_its_hooks_bring_it(tmp_path):
    model = torch.nn.Sequential(LlamaRMSNorm(8), torch.nn.Linear(8, 8))
    accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert [device["device"] for device in patch_model(model).devices] == ["cpu"]
