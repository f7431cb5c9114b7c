"""The float64 run of a stored model: exact, no float32 left inside, and nothing left
behind.
"""

import copy

import pytest
import tiny_models
import torch
from torch import nn

from hf_rmsnorm.verification.float64 import in_float64

BF16, FP32 = torch.bfloat16, torch.float32

IDS = tiny_models.token_ids(2, 8)


def llama_in_double(model, ids):
    """The logits of a LLaMA in double, without the casts to float32 of its norms and of
    its rotary embedding.
    """
    exact = copy.deepcopy(model).double()
    for path, norm in tiny_models.norms(exact):
        plain = nn.RMSNorm(64, eps=norm.variance_epsilon)
        plain.weight = norm.weight
        exact.set_submodule(path, plain)
    frequencies = model.model.rotary_emb.inv_freq.double()

    def rotary(x, position_ids):
        angles = position_ids[..., None].double() * frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    exact.model.rotary_emb.forward = rotary
    with torch.no_grad():
        return exact(ids).logits


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_float64_run_is_double_without_the_casts(dtype):
    model = tiny_models.build("llama", dtype)
    with in_float64(model):
        y = model(IDS).logits
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, llama_in_double(model, IDS), rtol=0, atol=1e-12)


def test_double_alone_would_keep_float32_inside():
    model = tiny_models.build("llama")
    exact = llama_in_double(model, IDS)
    with torch.no_grad():
        doubled = copy.deepcopy(model).double()(IDS).logits
    assert (doubled - exact).abs().max() > 1e-9  # what the float64 run is for


def test_float64_run_is_double_where_no_cast_is_hidden():
    model = tiny_models.build("gpt2")
    with in_float64(model):
        y = model(IDS).logits
    with torch.no_grad():
        doubled = copy.deepcopy(model).double()(IDS).logits
    torch.testing.assert_close(y, doubled, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "family", ["qwen2", "qwen3", "mixtral", "gemma3_text", "phi3", "olmo2"]
)
def test_float64_run_serves_every_dtype_of_a_model_alike(family):
    """Weights that bfloat16 holds exactly are the same function in both dtypes, so
    float64 must not see which it is.
    """
    half = tiny_models.build(family, BF16)
    full = copy.deepcopy(half).float()
    for a, b in zip(half.buffers(), full.buffers(), strict=True):
        b.data = a.data.float()
    results = []
    for model in (half, full):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with in_float64(model):
            results.append(model(IDS).logits)
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(
            torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype
            for n in before
        )
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert 0 < (full(IDS).logits - results[1]).abs().max() < 1e-4


def test_float64_run_leaves_nothing_behind():
    """Dynamic rotary embeddings register new buffers when a sequence outgrows the old
    ones.
    """
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_models.build("llama", max_position_embeddings=4, rope_parameters=rope)
    rotary = model.model.rotary_emb
    before = dict(vars(rotary)), dict(rotary._buffers)
    with in_float64(model):
        model(IDS)
        assert rotary.inv_freq is not before[1]["inv_freq"]
    assert vars(rotary) == before[0]
    assert rotary.inv_freq is before[1]["inv_freq"]
    assert rotary.inv_freq.dtype == FP32


def test_float64_run_rotates_by_the_stored_frequencies_of_each_length():
    """A longrope embedding copies its long or its short frequencies over one buffer, by
    the sequence's length.
    """
    model = tiny_models.build("phi3", **tiny_models.LONGROPE)
    rotary = model.model.rotary_emb
    for length in (8, 40):
        ids = tiny_models.token_ids(2, length)
        with torch.no_grad():
            single = model(ids).logits  # chooses the frequencies, as any run before
        # the same model with these frequencies for any length
        plain = tiny_models.build("phi3")
        plain.load_state_dict(model.state_dict())
        plain.model.rotary_emb.inv_freq.copy_(rotary.inv_freq)
        plain.model.rotary_emb.attention_scaling = rotary.attention_scaling
        rotary.inv_freq.copy_(kept := torch.full_like(rotary.inv_freq, 0.3))
        with in_float64(model), in_float64(plain):
            exact = model(ids).logits
            expected = plain(ids).logits
        torch.testing.assert_close(exact, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(exact.float(), single, rtol=0, atol=1e-4)
        assert torch.equal(rotary.inv_freq, kept)  # as the model was before the run


def test_float64_run_keeps_the_eps_that_float32_implies():
    norm = nn.RMSNorm(8, eps=None)
    x = torch.full((1, 8), 1e-4)
    with in_float64(norm):
        y = norm(x)
    eps = torch.finfo(FP32).eps
    torch.testing.assert_close(
        y, x.double() / (x.double().square() + eps).sqrt(), rtol=1e-12, atol=0
    )
    assert norm.eps is None


@pytest.mark.parametrize(
    "write", [lambda kept, x: kept.add_(1), lambda kept, x: kept.copy_(x / 3)]
)
def test_float64_run_refuses_a_forward_that_writes_to_stored_tensors(write):
    class Keeper(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = nn.Buffer(torch.zeros(2))

        def forward(self, x):
            write(self.kept, x)
            return x

    model = Keeper()
    with (
        pytest.raises(
            RuntimeError, match="writes in place to a tensor stored in torch.float32"
        ),
        in_float64(model),
    ):
        model(torch.ones(2))
    assert model.kept.tolist() == [0, 0]


def test_float64_run_refuses_to_round_what_it_stores_to_half_precision():
    class Keeper(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = nn.Buffer(torch.zeros(1, dtype=BF16))
            self.weight = nn.Parameter(torch.tensor([1.001]))

        def forward(self, x):
            self.kept.copy_(self.weight)
            return x * self.kept

    model = Keeper()
    with (
        in_float64(model),
        pytest.raises(
            RuntimeError, match="writes in place to a tensor stored in torch.bfloat16"
        ),
    ):
        model(torch.ones(1, dtype=torch.float64))
    assert not model.kept.any()
