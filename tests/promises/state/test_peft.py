"""PEFT on a patched model and a patch on a PEFT model: the same numbers, gradients,
files and merged weights.

PEFT deep-copies the norms that an adapter trains, so a copy of a patched norm must be a
patched norm of its own.
"""

import pytest
import tiny_models
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend

peft = pytest.importorskip(
    "peft", reason="adapters come with peft, of scripts/requirements"
)

ALL_NORMS = ["norm", "input_layernorm", "post_attention_layernorm"]
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
ONE_NORM = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["model.norm"]}
ADAPTERS = {
    "LoRA": lambda: peft.LoraConfig(**LORA, init_lora_weights=False),
    "LoRA and one norm": lambda: peft.LoraConfig(**ONE_NORM),
    "LoRA and all norms": lambda: peft.LoraConfig(**LORA, modules_to_save=ALL_NORMS),
    "LNTuning": lambda: peft.LNTuningConfig(target_modules=ALL_NORMS),
}
TRAINED_NORMS = {"LoRA": 0, "LoRA and one norm": 1}  # of the others, all 5
ids = tiny_models.token_ids()
adapters = pytest.mark.parametrize("adapter", ADAPTERS)
orders = pytest.mark.parametrize("order", ["patch first", "adapter first"])


def adapted(adapter, order=None):
    """A model with an adapter that has been trained a little; patched in that order,
    None: not at all.
    """
    model = tiny_models.build("llama")
    if order == "patch first":
        patch_model(model, strict=True)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, ADAPTERS[adapter]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    if order == "adapter first":
        patch_model(model, strict=True)
    return model


def logits(model):
    with use_backend("reference"):
        return model(ids).logits


def assert_same_files(model, plain, folder):
    written = []
    for name, saved in (("patched", model), ("plain", plain)):
        saved.save_pretrained(folder / name)
        files = (folder / name).iterdir()
        written.append({path.name: path.read_bytes() for path in files})
    assert written[0] == written[1]


@orders
@adapters
def test_an_adapted_model_computes_the_same_and_every_norm_is_fused(
    adapter, order, fused_calls
):
    model = adapted(adapter, order)
    original = logits(tiny_models.build("llama"))
    expected = logits(adapted(adapter))
    assert not torch.equal(expected, original)
    assert torch.equal(logits(model), expected)
    assert len(fused_calls) == 5, "PEFT calls one of a norm's copies at each place"
    # The norm that an adapter stands in for is patched as well as its copy.
    assert len(tiny_models.fused_norms(model)) == 5 + TRAINED_NORMS.get(adapter, 5)
    with model.disable_adapter():
        assert torch.equal(logits(model), original)
    assert len(fused_calls) == 10
    assert torch.equal(logits(model), expected)


@orders
@adapters
def test_gradients_of_everything_the_adapter_trains(adapter, order):
    def gradients(m):
        m.train().zero_grad()
        m(ids, labels=ids).loss.backward()
        return tiny_models.gradients(m)

    model = adapted(adapter, order)
    expected = gradients(adapted(adapter))
    for backend in ("reference", "triton"):
        with use_backend(backend), count_launches() as launches:
            got = gradients(model)
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-7)
    # The first norm sees a frozen embedding: without a weight to train either, it needs
    # no backward.
    assert launches["norm_forward"] == 5
    assert launches["norm_backward"] == (5 if TRAINED_NORMS.get(adapter, 5) == 5 else 4)


@orders
@adapters
def test_saved_adapters_are_those_of_the_unpatched_model_and_load_into_a_patched_one(
    adapter, order, tmp_path
):
    plain = adapted(adapter)
    assert_same_files(adapted(adapter, order), plain, tmp_path)
    base = tiny_models.build("llama")
    if order == "patch first":
        patch_model(base)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "plain")
    if order == "adapter first":
        patch_model(again)
    assert torch.equal(logits(again), logits(plain))
    assert len(tiny_models.fused_norms(again)) == 5 + TRAINED_NORMS.get(adapter, 5)


@orders
@adapters
def test_merging_and_unloading_gives_the_merged_plain_model_patched(
    adapter, order, tmp_path, fused_calls
):
    merged = adapted(adapter).merge_and_unload()
    model = adapted(adapter, order).merge_and_unload()
    assert torch.equal(logits(model), logits(merged))
    assert len(fused_calls) == 5
    assert_same_files(model, merged, tmp_path)
    assert unpatch_model(model) == 5
    assert tiny_models.types(model) == tiny_models.types(merged)


@orders
def test_a_norm_under_an_accelerate_hook_keeps_it_in_its_copy(order, fused_calls):
    """PEFT gives the copy a hook of its own, around whichever forward the norm had."""
    model = tiny_models.build("llama")
    expected = logits(model)
    add_hook_to_module(model.model.norm, AlignDevicesHook(execution_device="cpu"))
    if order == "patch first":
        patch_model(model, strict=True)
    # changes nothing yet
    model = peft.get_peft_model(model, peft.LoraConfig(**ONE_NORM))
    if order == "adapter first":
        patch_model(model, strict=True)
    assert torch.equal(logits(model), expected)
    assert len(fused_calls) == 5
    wrapper = model.base_model.model.model.norm
    for norm in (wrapper.original_module, wrapper.modules_to_save["default"]):
        assert isinstance(norm._hf_hook, AlignDevicesHook)
        assert norm._old_forward.__self__ is norm
    assert unpatch_model(model) == 6
    assert torch.equal(logits(model), expected)
    assert len(fused_calls) == 5
