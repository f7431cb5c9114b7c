"""PatchReport: what it holds, how it prints, what it gives as JSON."""

import dataclasses
import json

import accelerate
import pytest
import tiny_models
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import patch_model


@pytest.fixture(scope="module")
def report():
    model = tiny_models.build("qwen3", num_hidden_layers=12)
    return patch_model(model, exclude="model.layers.3.*")


def test_to_dict_is_json_with_every_record(report):
    written = json.dumps(report.to_dict())
    data = json.loads(written)
    assert len(report.swapped) == 45
    assert len(data["swapped"]) == 45
    formula = data["swapped"][0]["formula"]
    assert formula["kind"] == "RMSNorm"
    assert formula["eps"] == 1e-6
    assert formula["text"] == str(report.swapped[0].formula)
    skipped = dataclasses.asdict(report.skipped[0])
    assert data["skipped"][0] == skipped


def test_print_is_compact(report):
    text = str(report)
    assert "45 norms swapped, 4 skipped" in text
    assert "model.layers.[0-2,4-11].input_layernorm" in text
    assert "model.layers.3.input_layernorm" in text
    assert "excluded by 'model.layers.3.*'" in text
    assert "residual add + post_attention_layernorm" in text
    assert "torch.compile traces the model's own code" in text
    assert len(text.splitlines()) == 20


class BatchRMSNorm(nn.BatchNorm1d):
    """No RMSNorm, but called so."""


def test_what_was_skipped_says_what_to_do():
    model = nn.Module()
    model.norm = LlamaRMSNorm(8)
    model.batch = BatchRMSNorm(8)
    model.scripted = torch.jit.script(nn.LayerNorm(8))
    model.replaced = LlamaRMSNorm(8)
    model.left_out = LlamaRMSNorm(8)
    model.replaced.forward = lambda x: x
    report = patch_model(model, exclude=["left_out"])
    cures = {record.path: record.cure for record in report.skipped}
    assert cures["batch"].startswith("nothing breaks, it runs its own forward")
    assert cures["scripted"] == "patch the model before torch.jit"
    assert "undo it and patch again" in cures["replaced"]
    assert cures["left_out"] == ""
    assert "what to do: patch the model before torch.jit" in str(report)
    for record in report.to_dict()["skipped"]:
        assert record["cure"] == cures[record["path"]]


def test_a_model_that_accelerate_has_offloaded_runs_where_its_hooks_bring_it(tmp_path):
    model = torch.nn.Sequential(LlamaRMSNorm(8), torch.nn.Linear(8, 8))
    accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    for parameter in model.parameters():
        assert parameter.is_meta
    (device,) = patch_model(model).devices
    assert device["device"] == "cpu"
