"""Models that cannot be patched, wholly or in part: one clear line, and the model as it
was.
"""

import warnings

import pytest
import tiny_models
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import patch_model, patched, unpatch_model


def assert_refused(model, error, match, **options):
    before = tiny_models.types(model)
    with pytest.raises(error, match=match) as caught:
        patch_model(model, **options)
    assert "\n" not in str(caught.value)
    assert tiny_models.types(model) == before


@pytest.mark.parametrize("model", [None, "gpt2", [], nn.Linear, torch.ones(2)])
@pytest.mark.parametrize(
    "function", [patch_model, unpatch_model, lambda model: patched(model).__enter__()]
)
def test_not_a_module(model, function):
    with pytest.raises(
        TypeError, match="needs a torch.nn.Module, got .*: load the model first"
    ):
        function(model)


def test_no_norms():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    with pytest.warns(
        UserWarning, match="changed no norm of this Sequential: there is none"
    ):
        report = patch_model(model)
    assert report.swapped == report.skipped == ()
    assert_refused(
        model, ValueError, "strict: this Sequential has no norm", strict=True
    )
    with (
        pytest.warns(UserWarning, match="there is none") as caught,
        patched(model) as report,
    ):
        assert not report.swapped
    assert caught[0].filename == __file__


@pytest.mark.parametrize("word", ["include", "exclude"])
def test_a_glob_that_matches_nothing(word):
    model = tiny_models.build("llama")
    expected = rf"{word}='model.norms' matches the path of no norm"
    assert_refused(model, ValueError, expected, **{word: ["*norm", "model.norms"]})


@pytest.mark.parametrize("eps", [-1e-6, float("nan")])
@pytest.mark.parametrize("build", [LlamaRMSNorm, nn.LayerNorm])
def test_an_eps_that_is_none(build, eps):
    model = nn.Sequential(build(8, eps=eps))
    with pytest.warns(UserWarning, match="none of 1 could be swapped"):
        patch_model(model)
    assert_refused(model, ValueError, "'0'", strict=True)


@pytest.mark.parametrize(
    "build", [lambda: nn.LayerNorm((2, 4)), lambda: nn.RMSNorm((2, 4))]
)
def test_a_norm_over_two_dimensions(build):
    model = nn.Sequential(build())
    with warnings.catch_warnings(record=True):
        report = patch_model(model)
    assert "more than the last dimension" in report.skipped[0].reason
    assert not report.swapped


def test_a_hidden_size_above_the_limit():
    with pytest.warns(UserWarning, match="none of 1"):
        report = patch_model(nn.Sequential(LlamaRMSNorm(16_385)))
    assert report.skipped[0].reason == "its hidden size 16385 is above 16384"


def test_a_class_that_refuses_to_be_subclassed():
    class Final(LlamaRMSNorm):
        def __init_subclass__(cls):
            raise TypeError("Final is final")

    model = nn.ModuleList([LlamaRMSNorm(8), Final(8)])
    before = tiny_models.types(model)
    report = patch_model(model)
    assert [record.path for record in report.swapped] == ["0"]
    assert "Final.__init_subclass__ would run" in report.skipped[0].reason
    unpatch_model(model)
    assert tiny_models.types(model) == before
    assert_refused(model, ValueError, "Final.__init_subclass__", strict=True)


class GatedRMSNorm(LlamaRMSNorm):
    def __init__(self, size):
        super().__init__(size)
        self.gate = nn.Linear(size, size)


class EncoderStableLayerNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.LayerNorm(size)


def test_a_norm_with_children_is_listed_and_a_block_named_after_its_norms_is_not():
    report = patch_model(nn.Sequential(GatedRMSNorm(16), EncoderStableLayerNorm(16)))
    assert [(r.path, r.reason) for r in report.skipped] == [("0", "it has submodules")]
    assert [r.path for r in report.swapped] == ["1.norm"]
