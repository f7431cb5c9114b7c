"""QLoRA as it is commonly done, with the real bitsandbytes and PEFT: the same numbers
patched, and verified.
"""

import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_rmsnorm import patch_model, use_backend, verify_equivalence
from hf_rmsnorm.demo import demo_path

peft = pytest.importorskip(
    "peft", reason="adapters come with peft, of scripts/requirements"
)
pytest.importorskip(
    "bitsandbytes", reason="the real quantised layers come with bitsandbytes"
)
pytestmark = pytest.mark.full

HALF = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
NF4 = HALF | {"bnb_4bit_quant_type": "nf4"}
CONFIGS = {
    "nf4": NF4,
    "nf4 twice": NF4 | {"bnb_4bit_use_double_quant": True},
    "8-bit": {"load_in_8bit": True},
}
LINEARS = {"nf4": "Linear4bit", "nf4 twice": "Linear4bit", "8-bit": "Linear8bitLt"}
kinds = pytest.mark.parametrize("kind", CONFIGS)
ids = torch.tensor([list(b"The import statement")])


def load(kind):
    config = BitsAndBytesConfig(**CONFIGS[kind])
    return AutoModelForCausalLM.from_pretrained(
        demo_path("llama"),
        quantization_config=config,
        dtype=torch.bfloat16,
        local_files_only=True,
    ).eval()


def prepared(kind, order=None, **how):
    """A model for QLoRA, patched in that order; None: not at all."""
    model = load(kind)
    if order == "patch first":
        patch_model(model, strict=True)
    prepare = peft.prepare_model_for_kbit_training
    model = prepare(model, use_gradient_checkpointing=False)
    how |= {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(**how))
    if order == "patch last":
        patch_model(model, strict=True)
    return model


def trained(model):
    """Logits, and the gradients of the adapter."""
    out = model.train()(input_ids=ids, labels=ids)
    out.loss.backward()
    return out.logits.detach(), tiny_models.gradients(model)


@kinds
@pytest.mark.parametrize("order", ["patch first", "patch last"])
def test_patched_training_has_the_logits_and_gradients_of_the_unpatched(
    kind, order, fused_calls
):
    logits, gradients = trained(prepared(kind))
    model = prepared(kind, order)
    with use_backend("reference"):
        ours_logits, ours = trained(model)
    assert len(fused_calls) == len(tiny_models.norms(model)) == 11
    assert torch.equal(ours_logits, logits)
    assert len(ours) == 20
    assert all("lora" in name for name in ours)
    for name, expected in gradients.items():
        # bfloat16 and int8 in between: a rounding to the other side moves what comes
        # before it by a step.
        atol = 2.0**-6 * expected.abs().max().item()
        torch.testing.assert_close(ours[name], expected, rtol=2.0**-5, atol=atol)


@kinds
def test_a_quantised_model_is_verified(kind):
    with use_backend("reference"):
        report = verify_equivalence(
            load(kind), inputs=ids, max_new_tokens=2, backward=True
        )
    assert report.passed
    assert report.quantised == {LINEARS[kind]: 35}
    assert 0 < report.noise_floor.reference_max < 1  # of logits up to 20


@pytest.mark.parametrize("kind, dora", [("nf4 twice", True), ("8-bit", False)])
def test_a_model_with_an_adapter_is_verified(kind, dora):
    """DoRA reads the weight's codes outside of the quantised linear."""
    model = prepared(kind, "patch last", use_dora=dora)
    with use_backend("reference"):
        report = verify_equivalence(model, inputs=ids, max_new_tokens=2)
    assert report.passed and report.noise_floor.reference_max < 1
