"""`verify_equivalence`: which inputs it makes or takes, and which models it compares."""

import copy

import pytest
import tiny_models
import torch
import towers
import transformers
from towers import IMAGE

from hf_rmsnorm import unpatch_model, use_backend, verify_equivalence

IDS = tiny_models.token_ids(2, 8)


def in_plain_torch(*models):
    with use_backend("reference"):
        return verify_equivalence(*models)


AUDIO = {**towers.AUDIO, "vocab_size": 32}
BOTH = {"text_config": towers.TEXT, "vision_config": IMAGE}
WHISPER = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "vocab_size": 64, "num_mel_bins": 8, "max_source_positions": 20,
    "max_target_positions": 16, "pad_token_id": 0, "decoder_start_token_id": 1,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config", "norms", "rows"),
    [
        ("ViTModel", ("ViTConfig", IMAGE), 3, 2 * 5 + 2),
        ("ViTForImageClassification", ("ViTConfig", IMAGE), 3, 2),
        ("Wav2Vec2Model", ("Wav2Vec2Config", AUDIO), 4, 2 * 49 * 2),
        ("Wav2Vec2ForCTC", ("Wav2Vec2Config", AUDIO), 4, 2 * 49),
        ("CLIPModel", ("CLIPConfig", {**BOTH, "projection_dim": 16}), 7, 2 + 2),
        ("SiglipModel", ("SiglipConfig", BOTH), 7, 2 + 2),
        ("WhisperForConditionalGeneration", ("WhisperConfig", WHISPER), 7, 2 * 8),
        ("LlamaModel", ("LlamaConfig", towers.TEXT), 3, 2 * 8),
    ],
)
def test_a_model_needs_no_inputs(name, config, norms, rows):
    torch.manual_seed(0)
    kind, settings = config
    config = getattr(transformers, kind)(**settings)
    model = getattr(transformers, name)(config)
    report = in_plain_torch(model)
    assert report.passed, str(report)
    assert not report.unreached
    assert len(report.norms) == norms
    assert report.noise_floor.rows == rows


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ([], ValueError, "inputs are empty"),
        ({}, ValueError, "inputs are empty"),
        (IDS[:1, :0], ValueError, r"inputs\[0\]: input_ids is .* of shape \(1, 0\)"),
        (IDS.float(), ValueError, "input_ids is torch.float32"),
        (
            torch.tensor([[1, 128]]),
            ValueError,
            "1 to 128 where the model knows 0 to 127",
        ),
        ("some text", TypeError, r"inputs\[0\] is str"),
        (["some text"], TypeError, r"inputs\[0\] is str"),
    ],
)
def test_bad_inputs(inputs, error, message):
    model = tiny_models.build("llama")
    before = [type(module) for module in model.modules()]
    with pytest.raises(error, match=message) as caught:
        verify_equivalence(model, inputs=inputs)
    assert "\n" not in str(caught.value)
    after = [type(module) for module in model.modules()]
    assert after == before


class Silent(torch.nn.LayerNorm):
    """A model that returns nothing to compare."""

    def __init__(self):
        super().__init__(8)

    def forward(self, x):
        return {"seen": super().forward(x).shape}


def test_models_that_cannot_be_compared():
    model = tiny_models.build("llama")
    with pytest.raises(TypeError, match="needs a torch.nn.Module, got str"):
        verify_equivalence("llama", inputs=IDS)
    with pytest.raises(
        ValueError,
        match="vocabularies differ: 128 words in the reference, 160 in the candidate",
    ):
        verify_equivalence(model, tiny_models.build("llama", vocab_size=160), IDS)
    with pytest.raises(ValueError, match="has no weights"):
        empty = copy.deepcopy(model).to("meta")
        verify_equivalence(model, empty, IDS)
    with pytest.raises(
        ValueError, match="LayerNorm: nothing is known of the input None: pass inputs"
    ):
        verify_equivalence(torch.nn.LayerNorm(8))
    model.main_input_name = "point_clouds"
    with pytest.raises(
        ValueError,
        match="LlamaForCausalLM: nothing is known of the input 'point_clouds': pass inputs",
    ):
        verify_equivalence(model)
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match="Silent returns no logits and no hidden state"),
    ):
        verify_equivalence(Silent(), inputs={"x": torch.ones(2, 8)})
    assert unpatch_model(model) == 0
