"""A converted checkpoint, patched: its LayerNorms run the RMSNorm it records,
everywhere, while that is the same.
"""

import copy
import json

import pytest
import tiny_models
import torch
from accelerate import disk_offload
from conversion_models import carry_out
from transformers import AutoModelForCausalLM, GPT2ForSequenceClassification, GPT2Model

from hf_rmsnorm import (
    is_patched,
    patch_model,
    patched,
    unpatch_model,
    use_backend,
    verify_equivalence,
)
from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.model import make_proxy
from hf_rmsnorm.converted.record import RECORD_KEY

IDS = torch.arange(3, 35).view(2, 16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(source, converted) checkpoints of a small GPT-2 whose weights have means
    everywhere.
    """
    source, converted = (
        tmp_path_factory.mktemp(name) for name in ("source", "converted")
    )
    torch.manual_seed(0)
    model = tiny_models.build("gpt2").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 + 0.1 * torch.randn(parameter.shape))
    model.save_pretrained(source)
    plan = discover(make_proxy(source))
    state = model.state_dict()
    del state["lm_head.weight"]  # the embedding again
    tensors = carry_out(plan, state)
    config = copy.deepcopy(model.config)
    for key, value in plan.config.items():
        setattr(config, key, value)
    result = type(model)(config)
    result.load_state_dict(tensors)
    result.save_pretrained(converted)
    return source, converted


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


def converted(report):
    """Whether norms of a report run as their record says: all, none, or some."""
    return {record.converted for record in report.swapped}


def kinds(model):
    return converted(patch_model(model))


def test_recorded_norms_become_rms_norms(folders):
    report = patch_model(load(folders[1]))
    assert converted(report) == {True}
    for record in report.swapped:
        assert not record.formula.centered
        assert record.formula.has_bias
    assert "as the converted checkpoint says" in str(report)
    assert all(record["converted"] for record in report.to_dict()["swapped"])


@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
def test_the_logits_are_those_of_the_source(folders, backend):
    expected = logits(load(folders[0]).double())
    model = load(folders[1])
    patch_model(model)
    with use_backend(backend):
        y = logits(model)
    own = (logits(load(folders[0])).double() - expected).abs().max()
    assert (y.double() - expected).abs().max() <= 3 * own + 1e-6


def rms_norm(norm, x):
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
    return x * rstd * norm.weight + norm.bias


def test_the_recorded_formula_runs_on_every_backend(folders):
    """On an input with a mean, where LayerNorm and RMSNorm differ, nothing computes the
    LayerNorm.
    """
    model = load(folders[1])
    norm = model.transformer.h[0].ln_1
    x = torch.randn(4, norm.weight.numel()) + 3.0
    layer_norm = norm(x)
    patch_model(model)
    rms = rms_norm(norm, x)
    for dtype, backend in (
        (torch.float32, "auto"),
        (torch.float32, "triton"),
        (torch.float64, "auto"),  # no kernel serves it
        (torch.float64, "reference"),
    ):
        with use_backend(backend):
            y = norm.to(dtype)(x.to(dtype))
        torch.testing.assert_close(y, rms.to(dtype), rtol=1e-5, atol=1e-5)
    assert (rms - layer_norm).abs().max() > 0.1
    model.float()
    unpatch_model(model)
    assert torch.equal(norm(x), layer_norm)


def test_a_model_whose_norms_are_all_excluded_later_is_what_it_was(folders):
    model = load(folders[1])
    patch_model(model)
    with patched(model, exclude="*") as report:
        assert not report.swapped
    assert kinds(model) == {True}
    patch_model(model, exclude="*")
    assert not is_patched(model)


def test_a_writer_that_has_moved_keeps_layer_norm(folders):
    model = load(folders[1])
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight += 1e-3
    expected = logits(model)
    report = patch_model(model)
    for r in report.swapped:
        assert r.formula.centered
        assert not r.converted
    assert (
        "transformer.h.1.mlp.c_proj.weight no longer has zero mean"
        in report.swapped[0].notes
    )
    with use_backend("reference"):
        assert torch.equal(logits(model), expected)


def test_a_writer_that_has_moved_since_is_noticed_by_any_later_patch(folders):
    model = load(folders[1])
    assert all(record.converted for record in patch_model(model).swapped)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight += 1e-3
    report = patch_model(model, include="*.h.0.*")
    assert not any(record.converted for record in report.swapped)


@pytest.mark.parametrize(
    "writers", [{"residual_weights": {}}, {"residual_weights": None}, {}]
)
def test_a_record_without_writers_keeps_layer_norm(folders, writers):
    model = load(folders[1])
    record = dict(model.config.hf_rmsnorm)
    del record["residual_weights"]
    model.config.hf_rmsnorm = record | writers
    report = patch_model(model)
    assert "names nothing that writes to the residual stream" in str(report)
    assert all(record.formula.centered for record in report.swapped)


def test_a_model_trained_as_rms_norm_says_so_in_its_record(folders):
    model = load(folders[1])
    model.config.hf_rmsnorm["computes"] = "rms_norm"
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight += 1e-3
    assert kinds(model) == {True}


class Clamped(torch.nn.LayerNorm):
    def forward(self, x):
        return super().forward(x).clamp(-1e9, 1e9)


def test_a_model_trained_as_rms_norm_with_a_norm_that_is_not_recognised_is_refused(
    folders,
):
    model = load(folders[1])
    model.config.hf_rmsnorm["computes"] = "rms_norm"
    model.transformer.ln_f.__class__ = Clamped
    with pytest.raises(
        ValueError,
        match=r"'transformer.ln_f' \(Clamped\) cannot run so: its forward calls",
    ):
        patch_model(model)
    assert not is_patched(model)


def test_without_weights_it_stays_a_layer_norm(folders):
    for model in (
        load(folders[1]).to("meta"),
        torch.nn.Sequential(load(folders[1]).to("meta")),
    ):
        report = patch_model(model)
        assert converted(report) == {False}
        assert (
            "is not here whole; patch once the weights are loaded"
            in report.swapped[0].notes
        )


def test_the_rounding_of_a_narrower_dtype_keeps_layer_norm_and_is_named(
    folders, tmp_path
):
    load(folders[1]).bfloat16().save_pretrained(tmp_path)
    for dtype, wanted in (("auto", True), (torch.float32, False)):
        report = patch_model(
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        )
        assert converted(report) == {wanted}
    assert 'dtype="auto"' in report.swapped[0].notes


class Around(torch.nn.Module):
    """A model with parameters of its own around a converted one."""

    def __init__(self, model):
        super().__init__()
        self.language_model = model
        self.projector = torch.nn.Linear(3, model.config.n_embd)


def test_parameters_outside_of_the_converted_model_keep_layer_norm(folders):
    """What they make may enter its stream as embeddings, with a mean."""
    model = Around(load(folders[1]))
    report = patch_model(model)
    assert converted(report) == {False}
    assert (
        "projector.weight is outside of the GPT2LMHeadModel that was converted"
        in report.swapped[0].notes
    )
    unpatch_model(model)
    assert kinds(model.language_model) == {True}
    trained = Around(load(folders[1]))
    trained.language_model.config.hf_rmsnorm["computes"] = "rms_norm"
    assert kinds(trained) == {True}


def test_a_head_that_is_loaded_with_a_base_model_is_not_outside(folders, tmp_path):
    record = load(folders[1]).transformer
    names = record.config.hf_rmsnorm
    for part in ("residual_weights", "rms_norms"):
        names[part] = {
            name.removeprefix("transformer."): how for name, how in names[part].items()
        }
    record.save_pretrained(tmp_path)
    for cls in (GPT2Model, GPT2ForSequenceClassification):
        model = cls.from_pretrained(tmp_path, pad_token_id=0)
        assert kinds(model) == {True}, cls
    unpatch_model(model)
    assert kinds(Around(model)) == {False}


def test_a_soft_prompt_keeps_layer_norm(folders):
    peft = pytest.importorskip(
        "peft", reason="adapters come with peft, of scripts/requirements"
    )
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    report = patch_model(peft.get_peft_model(load(folders[1]), config))
    assert converted(report) == {False}
    assert (
        "prompt_encoder.default.embedding.weight is outside" in report.swapped[0].notes
    )


def test_weights_on_the_disk_are_looked_at(folders, tmp_path):
    """What accelerate reads when a module runs, it reads for the check too, and takes
    away again.
    """
    for change, wanted in ((0.0, True), (1e-2, False)):
        model = load(folders[1])
        with torch.no_grad():
            model.transformer.h[1].mlp.c_proj.weight.add_(change)
        expected = logits(model)
        disk_offload(model, tmp_path / str(wanted))
        report = patch_model(model)
        assert converted(report) == {wanted}
        for parameter in model.parameters():
            assert parameter.is_meta
        torch.testing.assert_close(logits(model), expected)


def test_a_hook_on_what_writes_to_the_stream_keeps_layer_norm(folders):
    model = load(folders[1])
    model.transformer.h[0].attn.c_proj.register_forward_hook(
        lambda module, args, output: output + 1
    )
    expected = logits(model)
    report = patch_model(model)
    assert converted(report) == {False}
    assert "transformer.h.0.attn.c_proj has a hook" in report.swapped[0].notes
    torch.testing.assert_close(logits(model), expected)


def test_another_eps_than_the_recorded_keeps_layer_norm(folders):
    model = load(folders[1])
    model.transformer.ln_f.eps = 1e-3
    by_path = {}
    for r in patch_model(model).swapped:
        by_path[r.path] = r.converted
    assert not by_path["transformer.ln_f"] and by_path["transformer.h.0.ln_1"]


def test_an_eps_changed_after_the_patch_is_obeyed(folders):
    model = load(folders[1])
    patch_model(model)
    norm = model.transformer.ln_f
    x = torch.randn(3, model.config.n_embd)
    norm.eps = 0.5
    with use_backend("reference"):
        y = norm(x)
    torch.testing.assert_close(y, rms_norm(norm, x))


def test_a_call_that_the_record_does_not_speak_of_is_refused(folders):
    model = load(folders[1])
    patch_model(model)
    with pytest.raises(TypeError, match="unpatch it to call it in another way"):
        model.transformer.ln_f(torch.ones(2, 4), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verify_judges_a_converted_model_by_its_logits(folders, dtype):
    model = load(folders[1]).to(dtype)
    for again in (False, True):
        with use_backend("triton"):
            report = verify_equivalence(model, inputs=IDS, max_new_tokens=4)
        assert report.passed, str(report)
        assert not report.norms
        if not again:
            patch_model(model)


def test_the_record_survives_saving_and_a_wrapper(folders, tmp_path):
    model = load(folders[1])
    patch_model(model)
    model.save_pretrained(tmp_path)
    assert (
        json.loads((tmp_path / "config.json").read_text())["hf_rmsnorm"]
        == model.config.hf_rmsnorm
    )
    wrapped = torch.nn.Sequential(load(tmp_path))
    assert kinds(wrapped) == {True}


CENTRING = {"axis": 0, "block": 16, "blocks": None}
HOSTILE = [
    {"rms_norms": {"model.norm": 3}},
    {"rms_norms": ["model.norm"]},
    {"rms_norms": {"model.norm": {"eps": "1e-5"}}},
    {"rms_norms": {}, "residual_weights": [1]},
    {"rms_norms": {}, "residual_weights": {"w": {"axis": 0}}},
    *[
        {"rms_norms": {}, "residual_weights": {"w": CENTRING | wrong}}
        for wrong in (
            {"axis": "0"}, {"axis": None}, {"block": 0}, {"block": -16},
            {"block": 16.0}, {"blocks": "0"}, {"blocks": []}, {"count": "1"}, {"x": 1},
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize("record", HOSTILE, ids=str)
def test_a_record_that_no_conversion_writes_is_refused_in_one_line(record):
    model = tiny_models.build("llama")
    setattr(model.config, RECORD_KEY, {"version": 1, **record})
    with pytest.raises(ValueError, match="no record that this package reads") as e:
        patch_model(model)
    assert "\n" not in str(e.value)
    assert not is_patched(model)
