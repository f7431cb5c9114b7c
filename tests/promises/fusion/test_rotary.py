"""The rotary embedding of attentions that have no q/k norms: one launch with the model's
own bits, forward and backward, and the model's own function wherever it is exchanged.
"""

import functools

import pytest
import tiny_models
import torch
from fusion_models import IDS
from transformers.models.llama import modeling_llama

from hf_rmsnorm import count_launches, patch_model, unpatch_model, use_backend
from hf_rmsnorm.patching.swap import unfuse

ROTARY = "rotary embedding"
GPT_NEOX = {"rotary_pct": 0.25, "num_key_value_heads": None}
FAMILIES = {  # and how a model rotates
    "llama": {},  # grouped heads
    "phi": {"partial_rotary_factor": 0.5},
    "stablelm": {"partial_rotary_factor": 0.25},
    "gpt_neox": GPT_NEOX,
    "phi3": {"partial_rotary_factor": 0.5},
    "olmo2": {},  # a norm over all heads, float32 tables
    "glm": {"partial_rotary_factor": 0.5},  # pairs
    "cohere": {},
    "helium": {},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},  # tables of half
}


def both(family="llama", dtype=torch.bfloat16, **config):
    """The same patched model with its rotations in one launch, and by its own code."""
    models = []
    for _ in range(2):
        model = tiny_models.build(family, dtype, **FAMILIES[family], **config)
        patch_model(model)
        models.append(model)
    for module in models[1].modules():
        if type(module).__name__.endswith("Attention"):
            unfuse(module)
    return models


def outcome(model, ids=IDS):
    """The logits and all gradients."""
    logits = model(ids, use_cache=False).logits
    logits.float().square().mean().backward()
    gradients = tiny_models.gradients(model)
    assert gradients
    return [logits.detach(), *gradients.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_have_the_bits_of_the_models_own_rotation(family):
    results = []
    counts = []
    for model in both(family):
        with use_backend("triton"), count_launches() as counted:
            results.append(outcome(model))
        counts.append(counted)
    assert all(map(torch.equal, *results))
    fused, apart = counts
    for name in ("rotary_forward", "rotary_backward"):
        assert fused[name] and not apart[name]


def pieces_of(model, ids=IDS):
    with torch.no_grad(), use_backend("triton"), count_launches(model) as launches:
        logits = model(ids, use_cache=False).logits
    return logits, [p for p in launches.pieces if p.what == ROTARY]


own = modeling_llama.apply_rotary_pos_emb


@functools.wraps(own)
def wrapped(*args, **kwargs):
    return own(*args, **kwargs)


def reversed_rotation(q, k, cos, sin, unsqueeze_dim=1):
    return own(q, k, cos, -sin, unsqueeze_dim)


@pytest.mark.parametrize("other", [wrapped, reversed_rotation])
def test_a_function_that_takes_its_place_is_called(other, monkeypatch):
    models = both()
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", other)
    logits, pieces = pieces_of(models[0])
    expected, none = pieces_of(models[1])
    assert torch.equal(logits, expected)
    assert not none
    for piece in pieces:
        assert (piece.launched, piece.missed) == (0, 1)
        assert "it was exchanged" in piece.reason


def cast_k(module, args, output):
    return output.float()


def other_tables(change):
    def hook(module, args, output):
        return tuple(map(change, output))

    return hook


BAD = [
    ("k_proj", cast_k, "q, k, cos and sin are [torch.bfloat16, torch.float32, "),
    (
        "rotary_emb",
        other_tables(torch.Tensor.double),
        "one of q, k, cos and sin is torch.float64",
    ),
    (
        "rotary_emb",
        other_tables(lambda t: t[:, :1]),
        "in these layouts, [(2, 4, 12, 16), ",
    ),
    ("rotary_emb", other_tables(lambda t: t[:, None]), "(1, 1, 12, 16)]"),
]


@pytest.mark.parametrize("child, hook, reason", BAD)
def test_what_no_launch_serves_runs_the_models_own_function(child, hook, reason):
    results = []
    for model in both():
        for path, module in model.named_modules():
            if path.endswith(child):
                module.register_forward_hook(hook)
        try:
            logits, pieces = pieces_of(model)
        except RuntimeError as error:  # as the model's own function raises
            logits, pieces = str(error), []
        results.append(logits)
        for piece in pieces:
            assert piece.missed and reason in piece.reason
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        assert torch.equal(*results)


def test_it_is_listed_counted_and_undone():
    model = tiny_models.build("llama")
    before = tiny_models.types(model)
    report = patch_model(model)
    assert "LlamaAttention: apply_rotary_pos_emb in one launch" in str(report)
    _, pieces = pieces_of(model)
    assert [(p.path, p.launched, p.missed) for p in pieces] == [
        ("model.layers.0.self_attn", 1, 0),
        ("model.layers.1.self_attn", 1, 0),
    ]
    unpatch_model(model)
    assert tiny_models.types(model) == before
