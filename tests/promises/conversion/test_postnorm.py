"""`examples/postnorm`: part of a post-norm model converts exactly, all of it nearly."""

import json
import sys

import postnorm_models
import pytest
import torch
from places import EXAMPLES
from transformers import AutoTokenizer, BertConfig, BertModel

from hf_rmsnorm import patch_model
from hf_rmsnorm.conversion.plan import ConversionRefused
from hf_rmsnorm.demo import demo_path

sys.path.insert(0, str(EXAMPLES / "postnorm"))

import convert


def outputs(model, inputs):
    with torch.no_grad():
        first = model(**inputs)[0]
    mask = inputs["attention_mask"]
    return first[mask.bool()] if first.shape[:2] == mask.shape else first


def difference(a, b):
    return float((a - b).abs().max() / a.abs().max())


@pytest.mark.parametrize("kind", postnorm_models.KINDS)
def test_two_neurons_give_equal_outputs(kind):
    *_, swapped, count, keys = postnorm_models.KINDS[kind]
    model = postnorm_models.build(kind)
    conversion = convert.exact_post_norm(model, postnorm_models.batch(model))
    norms = conversion.report.norms
    assert (sum(norm.becomes_rms for norm in norms), len(norms)) == (swapped, count)
    assert all(conversion.config[key] == getattr(model.config, key) + 2 for key in keys)
    inputs = postnorm_models.batch(model, seed=7, rows=3, length=31)
    expected, result = outputs(model, inputs), postnorm_models.built(conversion, model)
    assert difference(expected, outputs(result, inputs)) <= 1e-12
    assert {norm.path for norm in patch_model(result).swapped if norm.converted} == {
        norm.path for norm in norms if norm.becomes_rms
    }
    assert difference(expected, outputs(result, inputs)) <= 1e-12


def test_least_squares_come_near_as_rms_norm_and_stay_equal_as_layer_norm():
    model = postnorm_models.build("bert")
    batches = [
        postnorm_models.batch(model, seed, rows=8, length=32) for seed in range(5)
    ]
    conversion = convert.fit_post_norm(model, batches)
    measured = conversion.report.measured
    assert measured["fit"]["relative_rms"] < 0.25 * measured["naive"]["relative_rms"]
    inputs = postnorm_models.batch(model, seed=20)
    expected, result = outputs(model, inputs), postnorm_models.built(conversion, model)
    assert difference(expected, outputs(result, inputs)) <= 1e-12
    assert all(norm.converted for norm in patch_model(result).swapped)
    assert 1e-9 < difference(expected, outputs(result, inputs)) < 0.5


def test_what_two_neurons_do_not_serve_is_refused():
    with pytest.raises(ConversionRefused, match=r"act\(z\) - act\(-z\) is not z"):
        convert.exact_post_norm(postnorm_models.build("bert", hidden_act="tanh"))


def test_the_script_writes_a_checkpoint(tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(demo_path("gpt2"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), intermediate_size=24, **sizes)
    src, dst, text = (tmp_path / name for name in ("src", "dst", "text.txt"))
    BertModel(config).save_pretrained(src)
    tokenizer.save_pretrained(src)
    text.write_text("\n".join(f"line {i} of a text" for i in range(9)))
    arguments = [str(src), str(dst), "--text", str(text)]
    assert convert.main(arguments) == 0 and "BertModel, fit" in capsys.readouterr().out
    record = json.loads((dst / "config.json").read_text())["hf_rmsnorm"]
    assert record["approximate"] and record["measured"]["fit"]["rows"] > 0
    report = patch_model(BertModel.from_pretrained(dst))
    assert any(norm.converted for norm in report.swapped)
    with pytest.raises(SystemExit):
        convert.main(arguments)
    assert "exists already" in capsys.readouterr().err
