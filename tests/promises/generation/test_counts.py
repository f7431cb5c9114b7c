"""What can be counted exactly without a GPU: launches, dispatched operators, bytes
saved for backward.
"""

import pages
import pytest
import tiny_models
import torch

from benchmarks.counting import Operators, saved_bytes
from hf_rmsnorm import count_launches, patch_model, use_backend


def saved_by_a_layer(family, memory_efficient, tokens, **config):
    """Bytes saved for backward by one more layer."""

    def saved(layers):
        config["num_hidden_layers"] = layers
        model = tiny_models.build(family, torch.bfloat16, **config).train()
        patch_model(model, memory_efficient=memory_efficient)
        ids = tiny_models.token_ids(1, tokens)
        with use_backend("triton"):
            return saved_bytes(
                lambda: model(ids, use_cache=False).logits, model.parameters()
            )

    return saved(2) - saved(1)


LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
QWEN_600M = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
SIZES = [
    ("llama", LLAMA_1B, "LLaMA-3.2-1B"),
    ("qwen3", QWEN_600M, "Qwen3-0.6B"),
]


@pytest.mark.full
@pytest.mark.parametrize(("family", "sizes", "row"), SIZES)
def test_bytes_saved_by_a_decoder_layer(family, sizes, row):
    """Per token; the page on training has the figures."""
    tokens = 4
    usual = saved_by_a_layer(family, False, tokens, **sizes) / tokens
    efficient = saved_by_a_layer(family, True, tokens, **sizes) / tokens
    two_inputs = 2 * sizes["hidden_size"] * 2  # in bfloat16
    assert usual - efficient == two_inputs
    shown = pages.row("docs/training.md", row)
    assert shown == [f"{usual:,.0f}", f"{efficient:,.0f}"]


def decode_step(family, layers, patch):
    """Operators, allocations left out, plus launches of one decoded token."""
    model = tiny_models.build(family, torch.bfloat16, num_hidden_layers=layers)
    if patch:
        patch_model(model)
    # each token of the prompt is interpreted, and none is counted
    ids = tiny_models.token_ids(1, 2)
    with torch.no_grad(), use_backend("triton"):
        cache = model(ids, use_cache=True).past_key_values
        with Operators() as operators, count_launches() as launches:
            model(ids[:, :1], past_key_values=cache, use_cache=True)
    return operators.computing + launches.total()


LAYERS = {  # operators and launches of a decoded layer: of Hugging Face's, and patched
    "llama": (40, 16),
    "mistral": (40, 16),
    "qwen2": (40, 16),
    "qwen3": (56, 16),
    "gemma3_text": (84, 18),
    "olmo2": (58, 19),
    "gpt2": (20, 19),
}


@pytest.mark.parametrize("family", LAYERS)
def test_operators_and_launches_of_a_layer(family):
    counts = [
        decode_step(family, 3, patch) - decode_step(family, 2, patch)
        for patch in (False, True)
    ]
    assert tuple(counts) == LAYERS[family]
