"""The float64 run of a stored model: exact, no float32 left inside, and nothing left
behind.
"""

import copy

import pytest
import tiny_models
import torch
from torch import nn

from hf_rmsnorm.verification.float64 import in_float64

BF16 = torch.bfloat16

FP32 = torch.float32

IDS = tiny_models.token_ids(2, 8)


def doubled(model):
    return copy.deepcopy(model).double()


def logits_of(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def exact_logits(model, ids=IDS):
    with in_float64(model):
        return model(ids).logits


def assert_same(y, expected):
    """Within the rounding of float64."""
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


def llama_in_double(model):
    """The logits of a LLaMA in double, without the casts to float32 of its norms and of
    its rotary embedding.
    """
    exact = doubled(model)
    for path, norm in tiny_models.norms(exact):
        plain = nn.RMSNorm(64, eps=norm.variance_epsilon)
        plain.weight = norm.weight
        exact.set_submodule(path, plain)
    frequencies = model.model.rotary_emb.inv_freq.double()

    def rotary(x, position_ids):
        positions = position_ids[..., None].double()
        angles = positions * frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    exact.model.rotary_emb.forward = rotary
    return logits_of(exact)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_float64_run_is_double_without_the_casts(dtype):
    model = tiny_models.build("llama", dtype)
    y = exact_logits(model)
    assert y.dtype == torch.float64
    assert_same(y, llama_in_double(model))


def test_float64_run_is_double_where_no_cast_is_hidden():
    model = tiny_models.build("gpt2")
    expected = logits_of(doubled(model))
    assert_same(exact_logits(model), expected)


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "mixtral", "gemma3_text", "phi3", "olmo2"]
)
def test_float64_run_serves_every_dtype_of_a_model_alike(family):
    """Weights that bfloat16 holds exactly are the same function in both dtypes, so
    float64 must not see which it is.
    """
    half = tiny_models.build(family, BF16)
    full = copy.deepcopy(half).float()
    buffers = dict(half.named_buffers())
    for name, buffer in full.named_buffers():
        buffer.data = buffers[name].float()
    results = []
    for model in (half, full):
        before = copy.deepcopy(model.state_dict())
        results.append(exact_logits(model))
        after = model.state_dict()
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert_same(*results)
    rounding = logits_of(full) - results[1]
    assert 0 < rounding.abs().max() < 1e-4


def test_float64_run_leaves_nothing_behind():
    """Dynamic rotary embeddings register new buffers when a sequence outgrows the old
    ones.
    """
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_models.build("llama", max_position_embeddings=4, rope_parameters=rope)
    rotary = model.model.rotary_emb
    before = dict(vars(rotary))
    frequencies = rotary.inv_freq
    with in_float64(model):
        model(IDS)
        assert rotary.inv_freq is not frequencies
    assert vars(rotary) == before
    assert rotary.inv_freq is frequencies
    assert rotary.inv_freq.dtype == FP32


def test_float64_run_rotates_by_the_stored_frequencies_of_each_length():
    """A longrope embedding copies its long or its short frequencies over one buffer, by
    the sequence's length.
    """
    model = tiny_models.build("phi3", **tiny_models.LONGROPE)
    rotary = model.model.rotary_emb
    for length in (8, 40):
        ids = tiny_models.token_ids(2, length)
        single = logits_of(model, ids)  # chooses the frequencies, as any run before
        # the same model with these frequencies for any length
        plain = tiny_models.build("phi3")
        plain.load_state_dict(model.state_dict())
        plain_rotary = plain.model.rotary_emb
        plain_rotary.inv_freq.copy_(rotary.inv_freq)
        plain_rotary.attention_scaling = rotary.attention_scaling
        rotary.inv_freq.fill_(0.3)
        kept = rotary.inv_freq.clone()
        exact = exact_logits(model, ids)
        assert_same(exact, exact_logits(plain, ids))
        exact = exact.float()
        torch.testing.assert_close(exact, single, rtol=0, atol=1e-4)
        assert torch.equal(rotary.inv_freq, kept)  # as the model was before the run


def test_float64_run_keeps_the_eps_that_float32_implies():
    norm = nn.RMSNorm(8, eps=None)
    x = torch.full((1, 8), 1e-4)
    with in_float64(norm):
        y = norm(x)
    eps = torch.finfo(FP32).eps
    wide = x.double()
    root = torch.sqrt(wide.square() + eps)
    expected = wide / root
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=0)
    assert norm.eps is None


class Keeper(nn.Module):
    """A model that writes to a stored tensor."""

    def __init__(self, dtype):
        super().__init__()
        zeros = torch.zeros(2, dtype=dtype)
        self.kept = nn.Buffer(zeros)
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        third = self.weight / 3
        self.kept.copy_(third)
        return x * self.kept


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_float64_run_refuses_a_forward_that_writes_to_stored_tensors(dtype):
    model = Keeper(dtype)
    message = f"writes in place to a tensor stored in {dtype}"
    with pytest.raises(RuntimeError, match=message), in_float64(model):
        model(torch.ones(2))
    assert not model.kept.any()
