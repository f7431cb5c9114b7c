"""`verify_equivalence`: what it must let pass, what it must catch, and that it leaves
the models alone.
"""

import copy
import json
import math

import accelerate
import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import (
    count_launches,
    patch_model,
    unpatch_model,
    use_backend,
    verify_equivalence,
)
from hf_rmsnorm.demo import demo_path

BF16 = torch.bfloat16

FP32 = torch.float32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IDS = tiny_models.token_ids(2, 8)
TEXT = "The following table lists the statements that may be used in a function."


class OffsetNorm(LlamaRMSNorm):
    """Gemma's weight offset where there is none."""

    def forward(self, hidden_states):
        offset = super().forward(hidden_states) / self.weight
        return super().forward(hidden_states) + offset


class OneRoundingNorm(LlamaRMSNorm):
    """The weight multiplied in float32 and one rounding, where Llama rounds before the
    weight.
    """

    def forward(self, hidden_states):
        hidden = hidden_states.float()
        variance = hidden.pow(2).mean(-1, keepdim=True)
        rstd = torch.rsqrt(variance + self.variance_epsilon)
        hidden = hidden * rstd
        y = self.weight.float() * hidden
        return y.to(hidden_states.dtype)


def trained_llama(dtype):
    return AutoModelForCausalLM.from_pretrained(
        demo_path("llama"), dtype=dtype, local_files_only=True
    )


def text_ids():
    return torch.tensor([list(TEXT.encode())])


def in_plain_torch(*models, **how):
    with use_backend("reference"):
        return verify_equivalence(*models, **how)


def compare(model, candidate, inputs=IDS, new_tokens=0):
    return verify_equivalence(model, candidate, inputs, max_new_tokens=new_tokens)


def modes_of(model):
    return [module.training for module in model.modules()]


def failed_norms(report):
    return [norm.path for norm in report.norms if not norm.passed]


def offload(model):
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def types_of(model):
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("length", [8, 31, 40])
def test_longrope_models_pass_within_across_and_beyond_their_first_context(length):
    model = tiny_models.build("phi3", **tiny_models.LONGROPE)
    ids = tiny_models.token_ids(1, length)
    report = in_plain_torch(model, inputs=ids, max_new_tokens=3, backward=True)
    assert report.passed
    assert report.gradients
    assert report.greedy.compared == 3


def test_gradients_need_a_candidate_that_is_patched():
    model = tiny_models.build("gpt2")
    changed = copy.deepcopy(model)
    with pytest.raises(ValueError, match="backward=True .* patch it"):
        in_plain_torch(model, changed, inputs=text_ids(), backward=True)


def test_no_more_is_generated_than_the_model_has_positions():
    model = tiny_models.build("gpt2", n_positions=16)
    for prompt, new in ((12, 4), (16, 0)):
        ids = torch.arange(3, 3 + prompt)
        report = in_plain_torch(model, inputs=ids)
        assert report.passed
        assert report.greedy.compared == new
    assert "fills the 16 positions" in report.greedy.text


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt2"])
def test_patched_models_pass(family, backend, dtype):
    model = tiny_models.build(family, dtype).to(DEVICE)
    before = types_of(model)
    with use_backend(backend):
        report = verify_equivalence(model, inputs=IDS, max_new_tokens=4)
    assert report.passed, f"\n{report}"
    assert report.greedy.compared == 2 * 4
    norms = tiny_models.norms(model)
    assert len(report.norms) == len(norms)
    for norm in report.norms:
        assert norm.compared
    assert bool(report.launches) == (backend == "triton")
    assert types_of(model) == before


def test_patched_candidate_beside_an_unpatched_reference():
    reference = tiny_models.build("qwen3", BF16).to(DEVICE)
    candidate = copy.deepcopy(reference)
    patch_model(candidate)
    report = compare(reference, candidate, IDS, 2)
    assert report.passed
    assert report.launches
    norms = tiny_models.norms(reference)
    assert len(report.norms) == len(norms)


def test_inputs_may_be_ids_a_mapping_or_a_list():
    model = tiny_models.build("gpt2")
    mask = torch.ones_like(IDS)
    mask[1, :3] = 0
    inputs = [IDS[0], {"input_ids": IDS, "attention_mask": mask}]
    candidate = copy.deepcopy(model)
    report = compare(model, candidate, inputs, 2)
    rows = IDS[0].numel() + mask.sum().item()
    assert report.noise_floor.rows == rows
    assert report.passed
    assert report.greedy.compared == 3 * 2


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_wrong_weight_offset_fails_the_noise_floor(dtype):
    model = trained_llama(dtype)
    candidate = copy.deepcopy(model)
    norm = candidate.model.layers[2].post_attention_layernorm
    norm.__class__ = OffsetNorm
    report = compare(model, candidate, text_ids(), 16)
    assert not report.noise_floor.passed
    assert failed_norms(report) == ["model.layers.2.post_attention_layernorm"]
    assert not report.passed
    assert not report.greedy.passed
    assert "rounding explains" in report.greedy.text


def test_wrong_eps_fails_the_noise_floor_in_float32():
    model = trained_llama(FP32)
    candidate = copy.deepcopy(model)
    norm = candidate.model.layers[0].input_layernorm
    norm.variance_epsilon = {1e-6: 1e-5, 1e-5: 1e-6}[norm.variance_epsilon]
    report = compare(model, candidate, text_ids(), 4)
    assert not report.noise_floor.passed
    # too little for anything but float64 to tell
    assert report.noise_floor.difference < 0.1
    assert not report.greedy.differing
    assert failed_norms(report) == ["model.layers.0.input_layernorm"]


@pytest.fixture(scope="module")
def wrongly_rounded():
    """The report on a model with one norm that rounds in another order."""
    model = trained_llama(BF16)
    candidate = copy.deepcopy(model)
    norm = candidate.model.layers[1].input_layernorm
    norm.__class__ = OneRoundingNorm
    return compare(model, candidate, text_ids(), 4)


def test_wrong_rounding_order_fails_norm_by_norm_where_logits_cannot_see_it(
    wrongly_rounded,
):
    assert wrongly_rounded.noise_floor.passed
    assert wrongly_rounded.greedy.passed
    (norm,) = wrongly_rounded.norms
    assert norm.path == "model.layers.1.input_layernorm"
    assert not norm.passed
    assert norm.differing > 0.1 * norm.compared
    assert "are off (limit" in norm.text
    assert not wrongly_rounded.passed


def test_report_prints_a_verdict_per_line_and_gives_plain_json(wrongly_rounded):
    text = str(wrongly_rounded)
    lines = text.splitlines()
    assert "PASS  error" in text
    assert "FAIL  norms" in text
    assert "FAIL      model.layers.1.input_layernorm:" in text
    assert max(map(len, lines)) <= 100
    assert lines[0] == "FAIL: norms"
    data = json.loads(json.dumps(wrongly_rounded.to_dict(), allow_nan=False))
    assert data["passed"] is False
    assert data["noise_floor"]["passed"] is True
    assert data["greedy"]["passed"] is True
    assert data["norms"][0]["path"] == "model.layers.1.input_layernorm"


def test_wrong_output_dtype_fails_norm_by_norm():
    class Wide(LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states).float()

    model = tiny_models.build("llama", BF16)
    candidate = copy.deepcopy(model)
    candidate.model.norm.__class__ = Wide

    def narrowed(module, args):
        return args[0].bfloat16()

    candidate.lm_head.register_forward_pre_hook(narrowed)
    report = compare(model, candidate)
    (norm,) = report.norms
    assert not norm.passed
    assert "returns torch.float32" in norm.text
    assert report.noise_floor.passed


def scale_an_element(norm):
    with torch.no_grad():
        norm.weight[3] *= 1.05


def hook(norm):
    def larger(module, args, y):
        return y * 1.002

    norm.register_forward_hook(larger)


def pre_hook(norm):
    def moved(module, args):
        return args[0] * 2 + 1

    norm.register_forward_pre_hook(moved)


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("change", [scale_an_element, hook, pre_hook])
def test_a_changed_weight_or_hook_of_one_norm_is_found(change, offloaded):
    model = tiny_models.build("llama", BF16)
    candidate = copy.deepcopy(model)
    change(candidate.model.layers[1].input_layernorm)
    if offloaded:
        for each in (model, candidate):
            offload(each)
    report = compare(model, candidate)
    (norm,) = report.norms
    assert norm.path == "model.layers.1.input_layernorm"
    assert not norm.passed
    assert not report.passed


def test_tie_between_words_is_not_a_failure():
    model = tiny_models.build("llama")
    with torch.no_grad():
        logits = model(IDS[:1]).logits
        top = logits[0, -1].argmax().item()
        other = (top + 1) % 128
        first, second = sorted([top, other])
        weight = model.lm_head.weight
        weight[other] = weight[top]
        candidate = copy.deepcopy(model)
        a_bit_less = 1 - 2**-23
        model.lm_head.weight[second] *= a_bit_less
        candidate.lm_head.weight[first] *= a_bit_less
    report = compare(model, candidate, IDS[:1], 1)
    assert report.greedy.differing
    assert report.greedy.passed
    assert report.passed
    assert f"{second} instead of {first}" in report.greedy.text
    assert "rounding explains" in str(report)


def test_a_norm_the_inputs_do_not_reach_is_named():
    model = tiny_models.build("llama")
    model.spare = LlamaRMSNorm(64)
    report = in_plain_torch(model, inputs=IDS, max_new_tokens=0)
    assert report.passed
    assert report.unreached == ("spare",)
    assert report.to_dict()["unreached"] == ["spare"]
    text = report.to_text(verbose=True)
    assert text.startswith("PASS, but the inputs did not reach 1 of 6 norms: spare\n")
    line = text.partition(" spare:")[2].splitlines()[0]
    assert line.endswith("not reached by these inputs")


def test_nothing_is_proven_where_no_norm_is_reached():
    model = tiny_models.build("llama")
    model.spare = LlamaRMSNorm(64)
    patch_model(model, include="spare")
    report = in_plain_torch(model, inputs=IDS, max_new_tokens=0)
    assert report.verdict == "FAIL"
    assert report.headline == "FAIL: norms"


def test_nothing_passes_where_both_give_nan():
    model = tiny_models.build("llama")
    with torch.no_grad():
        linear = model.model.layers[1].mlp.down_proj
        linear.weight[3] = math.nan
    report = in_plain_torch(model, inputs=IDS, max_new_tokens=2)
    text = str(report)
    assert text.startswith("FAIL: the original gives NaN or infinity in float64 too")
    assert not report.passed
    assert "PASS" not in text
    assert "FAIL  error" in text


@pytest.mark.parametrize("include", [None, "*.0.*", "*"])
def test_patch_state_is_restored_and_respected(include):
    model = tiny_models.build("llama").to(DEVICE)
    count = len(tiny_models.norms(model))
    if include:
        count = len(patch_model(model, include=include).swapped)
    before = types_of(model)
    report = verify_equivalence(model, inputs=IDS, max_new_tokens=2)
    assert types_of(model) == before
    assert report.passed
    assert len(report.norms) == count
    assert report.launches
    assert unpatch_model(model) == (count if include else 0)


def test_fused_modules_never_run_as_the_reference():
    reference = tiny_models.build("llama")
    candidate = copy.deepcopy(reference)
    patch_model(reference)
    before = types_of(reference)
    with count_launches() as launches:
        report = compare(reference, candidate, IDS, 2)
    assert not launches
    assert report.noise_floor.difference == 0
    assert types_of(reference) == before


def test_training_flags_and_hooks_are_restored_and_dropout_is_off():
    model = tiny_models.build(
        "gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5
    ).train()
    model.transformer.h[0].eval()
    before = modes_of(model)
    candidate = copy.deepcopy(model)
    report = compare(model, candidate, IDS, 2)
    assert report.passed
    assert report.norms == ()
    assert report.noise_floor.difference == 0
    assert modes_of(model) == before
    for module in model.modules():
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("patch_first", [False, True])
def test_an_error_in_the_middle_changes_nothing(patch_first):
    class Broken(LlamaRMSNorm):
        def forward(self, hidden_states):
            if torch.is_grad_enabled() or hidden_states.dtype == torch.float64:
                # not in the plain reference run
                raise RuntimeError("broken on purpose")
            return super().forward(hidden_states)

    model = tiny_models.build("llama").train()
    if patch_first:
        patch_model(model, include="*.0.*")
    model.model.norm.__class__ = Broken
    before = types_of(model)
    training = modes_of(model)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        verify_equivalence(model, copy.deepcopy(model), IDS)
    assert types_of(model) == before
    assert modes_of(model) == training
    for module in model.modules():
        assert not module._forward_pre_hooks


def test_other_architectures_compare_by_logits_alone():
    model = tiny_models.build("llama")
    other = tiny_models.build("llama", num_hidden_layers=3)
    report = verify_equivalence(model, other, IDS, norms=False, max_new_tokens=0)
    assert report.norms == ()
    assert not report.noise_floor.passed
    assert not report.passed
    with pytest.raises(ValueError, match="architectures differ: .* no model.layers.2"):
        verify_equivalence(model, other, IDS, max_new_tokens=0)
