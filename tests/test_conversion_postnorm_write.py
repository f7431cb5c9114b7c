"""`hf-rmsnorm convert --post-norm`: a BERT from folder to folder."""

import json

import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel

from hf_rmsnorm import patch_model
from hf_rmsnorm.cli.main import main
from hf_rmsnorm.conversion import ConversionRefused, convert_post_norm


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                 intermediate_size=24, max_position_embeddings=32)).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 + 0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return folder


def hidden(folder):
    model = AutoModel.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        return model(torch.arange(3, 27).view(2, 12)).last_hidden_state


def test_exact_gives_equal_outputs_with_two_more_neurons(bert, tmp_path, capsys):
    dst = tmp_path / "out"
    assert main(["convert", str(bert), str(dst), "--post-norm", "exact", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["published"] and data["report"]["level"] == "exact" and data["verification"]["passed"]
    config = json.loads((dst / "config.json").read_text())
    assert config["intermediate_size"] == 26
    assert (hidden(dst) - hidden(bert)).abs().max() < 1e-5  # two more neurons, rounded to float32
    swapped = {r.path: r.converted for r in patch_model(AutoModel.from_pretrained(dst)).swapped}
    assert swapped["encoder.layer.0.output.LayerNorm"] and swapped["embeddings.LayerNorm"]
    assert not swapped["encoder.layer.0.attention.output.LayerNorm"]
    assert not dst.with_name("out.converting").exists()


def test_refusals_leave_nothing(bert, tmp_path, capsys):
    with pytest.raises(ConversionRefused, match="no tokenizer"):
        convert_post_norm(bert, tmp_path / "out", "fit")
    with pytest.raises(ConversionRefused, match="choose one of"):
        convert_post_norm(bert, tmp_path / "out", "best")
    assert main(["convert", str(bert), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "--post-norm exact" in error and "--post-norm fit" in error
    (tmp_path / "there").mkdir()
    assert main(["convert", str(bert), str(tmp_path / "there"), "--post-norm", "exact"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
