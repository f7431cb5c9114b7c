"""`hf-rmsnorm convert --post-norm`: from folder to folder."""

import json

import postnorm_models
import pytest
import torch
import transformers
from checkpoints import contents, load
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertConfig, BertModel

from hf_rmsnorm import patch_model
from hf_rmsnorm.cli.main import main
from hf_rmsnorm.conversion import ConversionRefused, VerificationFailed, convert_checkpoint, plan_conversion
from hf_rmsnorm.conversion.targets.postnorm import convert
from hf_rmsnorm.conversion.twin.twin import give_weights
from hf_rmsnorm.demo import demo_path


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


# class -> type, config, norms that `exact` makes RMSNorms
CLASSES = {
    "BertModel": ("bert", postnorm_models.BERT, 3),
    "BertForMaskedLM": ("bert", postnorm_models.BERT, 3),
    "BertForSequenceClassification": ("bert", postnorm_models.BERT, 3),
    "OPTForCausalLM": ("opt", postnorm_models.OPT, 2),
    "BartForConditionalGeneration": ("bart", postnorm_models.BART, 6),
}


def save(folder, name, **how):
    """A model with weights as training leaves them, and a tokenizer."""
    model_type, sizes, _ = CLASSES[name]
    tokenizer = AutoTokenizer.from_pretrained(demo_path("gpt2"))
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    sizes = {**sizes, **special, "vocab_size": len(tokenizer), "max_position_embeddings": 96}
    torch.manual_seed(0)
    model = getattr(transformers, name)(AutoConfig.for_model(model_type, **sizes)).eval()
    give_weights(model)
    model.save_pretrained(folder, **how)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("level", ["exact", "fit"])
@pytest.mark.parametrize("name", CLASSES)
def test_checkpoints_with_a_tokenizer(name, level, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(convert, "SENTENCES", 24)
    src, dst = save(tmp_path / "src", name), tmp_path / "dst"
    before = contents(src)
    assert main(["convert", str(src), str(dst), "--post-norm", level, "--prompt", "A text.", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    norms = data["report"]["norms"]
    swapped = sum(norm["becomes_rms"] for norm in norms)
    assert swapped == CLASSES[name][2] if level == "exact" else swapped > CLASSES[name][2]
    assert data["verification"]["passed"] and set(data["verification"]["runs"]) == {"as LayerNorm", "as RMSNorm"}
    config = json.loads((dst / "config.json").read_text())
    assert config["architectures"] == [name] and config["hf_rmsnorm"].get("approximate", False) == (level == "fit")
    assert contents(src) == before


@pytest.mark.parametrize("level", ["exact", "fit"])
def test_the_model_card_says_what_was_done(level, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "SENTENCES", 24)
    src, dst = save(tmp_path / "a model", "BertModel", max_shard_size="50KB"), tmp_path / "dst"
    (src / "README.md").write_bytes(b"# Mod\xe8le\r\n")
    done = convert_checkpoint(src, dst, post_norm=level)
    card = (dst / "README.md").read_bytes().decode("latin-1")
    assert "---\n\n# Mod\xe8le\n" in card and ("**Approximate.**" in card) == (level == "fit")
    assert str(done.plan.report) in card and str(done.verification) in card
    assert "Made from `a model` with hf-rmsnorm" in card and f"PyTorch {torch.__version__}" in card
    report = json.loads((dst / "conversion_report.json").read_text())
    assert report["source"] == "a model" and report["verification"]["passed"]
    assert report["report"]["level"] == level and ("fit" in report["report"]["measured"]) == (level == "fit")
    index = json.loads((dst / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in src.glob("*.safetensors"))
    assert len(shards) > 1 and set(index["weight_map"]) == set(load(dst)) == set(load(src))
    assert abs(len(set(index["weight_map"].values())) - len(shards)) <= 1  # two neurons may move a tensor
    for path in dst.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert json.loads(file.metadata()["hf_rmsnorm"])["source"] == "a model"


@pytest.mark.full
def test_a_result_that_fails_is_not_published(bert, tmp_path, monkeypatch, capsys):
    def damaged(*args, **kwargs):
        planned = plan_conversion(*args, **kwargs)
        planned.conversion.tensors["encoder.layer.0.output.dense.bias"][3] += 0.1
        return planned

    with pytest.raises(VerificationFailed, match="as LayerNorm: verdict FAIL"):
        convert_checkpoint(bert, tmp_path / "out", planned=damaged(bert, post_norm="exact"))
    assert not (tmp_path / "out").exists()
    assert "verdict FAIL" in (tmp_path / "out.converting" / "report.txt").read_text()
    monkeypatch.setattr("hf_rmsnorm.conversion.plan_conversion", damaged)
    arguments = ["convert", str(bert), str(tmp_path / "out"), "--post-norm", "exact"]
    assert main([*arguments, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["published"] is False and not (tmp_path / "out").exists()
    assert main([*arguments, "--no-verify"]) == 0
    assert "not run, as asked" in capsys.readouterr().out and (tmp_path / "out").is_dir()


def test_a_text_of_ones_own_is_fitted_on(tmp_path, capsys):
    src, text = save(tmp_path / "src", "BertModel"), tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i} of a text" for i in range(9)) + "\n")
    fit = ["convert", str(src), "--post-norm", "fit", "--plan", "--json", "--text", str(text)]
    assert main(fit) == 0
    own = json.loads(capsys.readouterr().out)["report"]["measured"]["fit"]
    assert own["rows"] == len("line 4 of a text") + 1  # every fifth is held out; a token is a byte; the pooler
    text.write_text("a\nb\n")
    assert main(fit) == 2 and "5 texts" in capsys.readouterr().err


def test_the_plan_alone_writes_nothing(bert, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(bert), "--plan", "--post-norm", "exact"]) == 0
    assert "3 of 5 norms become RMSNorm" in capsys.readouterr().out and not list(tmp_path.iterdir())


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
    with safe_open(dst / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["hf_rmsnorm"])["source"] == bert.name
    assert not dst.with_name("out.converting").exists()


def test_refusals_leave_nothing(bert, tmp_path, capsys):
    with pytest.raises(ConversionRefused, match="no tokenizer"):
        convert_checkpoint(bert, tmp_path / "out", post_norm="fit")
    checkpoint = BertModel.from_pretrained(bert, add_pooling_layer=False)
    checkpoint.save_pretrained(tmp_path / "src")
    with pytest.raises(ConversionRefused, match="has pooler.dense.* and the checkpoint has not"):
        convert_checkpoint(tmp_path / "src", tmp_path / "out", post_norm="exact")
    with pytest.raises(ConversionRefused, match="choose one of"):
        convert_checkpoint(bert, tmp_path / "out", post_norm="best")
    assert main(["convert", str(bert), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "--post-norm exact" in error and "--post-norm fit" in error
    (tmp_path / "there").mkdir()
    assert main(["convert", str(bert), str(tmp_path / "there"), "--post-norm", "exact"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src", "there"]
