"""The embedded models: they load offline, are really trained, and write words."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rmsnorm.demo import DEMO_MODELS, demo_path

# Written for this test, in no training text. Byte frequencies of the training text
# alone would give 3.02 nats.
UNSEEN = """\
If you open a file for reading and the file does not exist, an exception is raised. The function returns a list of
strings, one for each line of the file, and the optional argument gives the name of the encoding. When an object is
no longer needed, the method close() should be called, so that the resources used by the object are released.
"""
# measured when the models were committed, plus 0.05
UNSEEN_NATS_PER_BYTE = {"llama": 0.99, "qwen3": 0.99, "gpt2": 1.09}


@pytest.fixture(scope="module", params=DEMO_MODELS)
def demo(request):
    """(name, model in its stored dtype, tokenizer), read from the package alone."""
    path = demo_path(request.param)
    how = {"local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **how).eval()
    return request.param, model, AutoTokenizer.from_pretrained(path, **how)


def norm_weights(model):
    """Weights of every norm by parameter name: the 1-D parameters that are not biases."""
    return {
        n: p.float()
        for n, p in model.named_parameters()
        if p.ndim == 1 and n.endswith("weight")
    }


def test_unknown_name_is_one_clear_line():
    with pytest.raises(
        ValueError,
        match=r"^unknown demo model 'bert': choose one of llama, qwen3, gpt2$",
    ):
        demo_path("bert")


def test_together_under_12_megabytes():
    files = [f for name in DEMO_MODELS for f in demo_path(name).iterdir()]
    assert sum(f.stat().st_size for f in files) < 12_000_000
    assert sorted(f.parent.name for f in files if f.suffix == ".safetensors") == sorted(
        DEMO_MODELS
    )


def test_every_norm_weight_is_trained(demo):
    name, model, _ = demo
    weights = norm_weights(model)
    # qwen3: q_norm and k_norm beside the usual two
    per_layer = {"llama": 2, "qwen3": 4, "gpt2": 2}[name]
    assert len(weights) == per_layer * model.config.num_hidden_layers + 1
    for path, weight in weights.items():
        assert weight.std() > 0.02, path
        assert (weight != 1).float().mean() > 0.9, path


@torch.no_grad()
def test_loss_on_unseen_text(demo):
    name, model, tokenizer = demo
    ids = tokenizer(UNSEEN, return_tensors="pt").input_ids
    loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < UNSEEN_NATS_PER_BYTE[name]


@pytest.mark.parametrize(
    "text",
    ["  two  spaces , and ' s ", "naïve café — ½ · 한국어 日本語 🙂\r\n"],
)
def test_tokenizer_round_trip(demo, text):
    _, _, tokenizer = demo
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text


def test_tokenizer_end_of_text(demo):
    _, _, tokenizer = demo
    assert len(tokenizer) == 257
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 256
    assert tokenizer(["ab", "a"], padding=True).input_ids == [[97, 98], [97, 256]]
    assert tokenizer.decode([97, 256], skip_special_tokens=True) == "a"
