"""count_launches of a model: each fused piece that ran in a kernel, and each that did
not with the reason.
"""

import pytest
import tiny_models
import torch

from hf_rmsnorm import count_launches, patch_model, use_backend


@pytest.fixture
def model():
    model = tiny_models.build("qwen3")
    patch_model(model)
    return model


class Embeddings(torch.nn.Module):
    """Adds positions that all sequences share, as BERT does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.ones(1, 3, 8))
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x):
        x = x + self.positions
        return self.norm(x)


def counted(model, backend="auto"):
    with torch.no_grad(), use_backend(backend), count_launches(model) as launches:
        model(tiny_models.token_ids(1, 3))
    return launches


def by_piece(launches):
    """What -> [launched, missed, the reasons]."""
    pieces = {}
    for piece in launches.pieces:
        record = pieces.setdefault(piece.what, [0, 0, set()])
        record[0] += piece.launched
        record[1] += piece.missed
        if piece.reason:
            record[2].add(piece.reason)
    return pieces


def test_each_piece_that_ran_in_a_kernel_is_named_and_counted(model):
    launches = counted(model, "triton")
    layers = len(model.model.layers)
    assert by_piece(launches) == {
        "norm": [layers + 1, 0, set()],
        "residual add + norm": [layers, 0, set()],
        "q/k norms + rotary embedding": [layers, 0, set()],
    }
    assert launches == {"norm_forward": 2 * layers + 1, "qk_norm_forward": layers}
    text = str(launches)
    assert text.startswith(f"all {3 * layers + 1} pieces ran as fused kernels\n")
    assert f"{layers} x residual add + norm: launched {layers}x" in text
    assert "layers.[0-1].self_attn\n" in text


def test_a_piece_that_is_not_fused_is_named_with_the_reason(model):
    launches = counted(model, "reference")
    assert not launches
    for launched, _, reasons in by_piece(launches).values():
        assert launched == 0
        assert reasons == {"use_backend('reference') is in force"}
    assert str(launches).startswith("0 of ")
    assert "kernels   none" in str(launches)


def test_the_reason_is_a_dtype(model):
    _, missed, reasons = by_piece(counted(model.double()))["norm"]
    assert missed == 9 and reasons == {
        "x is torch.float64; the kernels serve float32, float16 and bfloat16"
    }


def test_the_reason_is_a_mixture_of_dtypes():
    model = torch.nn.Sequential(torch.nn.LayerNorm(8))
    patch_model(model)
    teacher = torch.nn.LayerNorm(8)
    patch_model(teacher)
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu"), count_launches(model) as launches:
        teacher(x.float())
        model(x)
    (piece,) = launches.pieces
    assert launches["norm_forward"] == 1, "the teacher's"
    assert piece.missed
    mixture = "x and its parameters are torch.bfloat16 and torch.float32"
    assert piece.reason.startswith(mixture)


def test_the_reason_is_a_sum_that_broadcasts():
    model = Embeddings()
    patch_model(model)
    with torch.no_grad(), count_launches(model) as launches:
        model(torch.ones(2, 3, 8))
    missed = [piece for piece in launches.pieces if piece.missed]
    assert [piece.what for piece in missed] == ["residual add + norm"]
    assert missed[0].reason == "the summands have the shapes (2, 3, 8) and (1, 3, 8)"


def test_the_reason_is_a_hook(model):
    layer = model.model.layers[0]
    layer.post_attention_layernorm.register_forward_hook(lambda *_: None)
    pieces = [piece for piece in counted(model, "triton").pieces if piece.missed]
    (piece,) = pieces
    assert piece.path == "model.layers.0.post_attention_layernorm"
    assert "has a hook" in piece.reason


def test_norms_of_q_and_k_that_are_called_by_themselves_are_named(model):
    attention = model.model.layers[1].self_attn
    attention.k_norm.register_forward_hook(lambda *_: None)
    (piece,) = [piece for piece in counted(model, "triton").pieces if piece.missed]
    assert piece.path == "model.layers.1.self_attn"
    assert piece.what == "q/k norms + rotary embedding"
    assert "hook" in piece.reason


def test_what_is_not_called_is_listed(model):
    with count_launches(model) as launches:
        pass
    assert {(piece.launched, piece.missed) for piece in launches.pieces} == {(0, 0)}
    assert len(launches.pieces) == 9
    assert "not called from Python" in str(launches)


def test_a_model_that_is_compiled_is_said_to_be(model):
    with count_launches(torch.compile(model, backend="eager")) as launches:
        pass
    assert "inside torch.compile" in str(launches)


def test_bad_models_are_refused_in_one_line():
    with pytest.raises(
        ValueError,
        match="no norm of this LlamaForCausalLM is patched: call patch_model",
    ):
        counted(tiny_models.build("llama"))
    with pytest.raises(
        TypeError, match="count_launches needs a torch.nn.Module, got str"
    ):
        counted("llama")
