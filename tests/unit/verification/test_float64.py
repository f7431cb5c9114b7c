"""The float64 run of a stored model: exact, no float32 left inside, and nothing left
behind.
"""

import copy
import math

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from torch import nn

from hf_rmsnorm.verification.float64 import in_float64

IDS = tiny_models.token_ids(2, 8)


def llama_by_hand(model, ids):
    """The LLaMA of Touvron et al. (2023) in float64 from stored weights and the stored
    rotary frequencies.
    """
    config, w = (
        model.config,
        {name: p.double() for name, p in model.state_dict().items()},
    )
    heads, groups = (
        config.num_attention_heads,
        config.num_attention_heads // config.num_key_value_heads,
    )
    size, length = model.model.layers[0].self_attn.head_dim, ids.shape[1]

    def norm(x, name):
        return (
            x
            / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
            * w[f"{name}.weight"]
        )

    def rotate(x):
        angle = (
            torch.arange(length, dtype=torch.float64)[:, None]
            * model.model.rotary_emb.inv_freq.double()
        )
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def split(x):
        return x.unflatten(-1, (-1, size)).transpose(1, 2)

    h = w["model.embed_tokens.weight"][ids]
    masked = torch.full((length, length), -math.inf, dtype=torch.float64).triu(1)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        x = norm(h, f"{layer}.input_layernorm")
        q, k, v = (split(x @ w[f"{layer}.self_attn.{n}_proj.weight"].T) for n in "qkv")
        k, v = rotate(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = rotate(q) @ k.transpose(-1, -2) / math.sqrt(size) + masked
        attended = (
            (scores.softmax(-1) @ v).transpose(1, 2).reshape(*ids.shape, heads * size)
        )
        h = h + attended @ w[f"{layer}.self_attn.o_proj.weight"].T
        x = norm(h, f"{layer}.post_attention_layernorm")
        gate, up = (x @ w[f"{layer}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        h = h + (F.silu(gate) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    return norm(h, "model.norm") @ w["lm_head.weight"].T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float64_run_is_a_llama_written_by_hand(dtype):
    model = tiny_models.build("llama", dtype)
    with in_float64(model):
        y = model(IDS).logits
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, llama_by_hand(model, IDS), rtol=0, atol=1e-12)


def test_double_alone_would_keep_float32_inside():
    model = tiny_models.build("llama")
    exact = llama_by_hand(model, IDS)
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
    half = tiny_models.build(family, torch.bfloat16)
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
    assert (
        rotary.inv_freq is before[1]["inv_freq"]
        and rotary.inv_freq.dtype == torch.float32
    )


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
            exact, expected = model(ids).logits, plain(ids).logits
        torch.testing.assert_close(exact, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(exact.float(), single, rtol=0, atol=1e-4)
        assert torch.equal(rotary.inv_freq, kept)  # as the model was before the run


def test_float64_run_keeps_the_eps_that_float32_implies():
    norm = nn.RMSNorm(8, eps=None)
    x = torch.full((1, 8), 1e-4)
    with in_float64(norm):
        y = norm(x)
    eps = torch.finfo(torch.float32).eps
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
            self.kept, self.weight = (
                nn.Buffer(torch.zeros(1, dtype=torch.bfloat16)),
                nn.Parameter(torch.tensor([1.001])),
            )

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
