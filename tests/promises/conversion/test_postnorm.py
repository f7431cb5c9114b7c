"""`examples/postnorm`: part of a post-norm model converts exactly, all of it nearly."""

import json
import sys

import postnorm_models
import pytest
import torch
from places import EXAMPLES
from transformers import AutoTokenizer, BertConfig, BertModel

from hf_rmsnorm import patch_model
from hf_rmsnorm.conversion.errors import ConversionRefused
from hf_rmsnorm.demo import demo_path

sys.path.insert(0, str(EXAMPLES / "postnorm"))

import convert


def outputs(model, inputs):
    with torch.no_grad():
        first = model(**inputs)[0]
    mask = inputs["attention_mask"]
    if first.shape[:2] == mask.shape:
        return first[mask.bool()]
    return first


def difference(a, b):
    largest = (a - b).abs().max()
    return float(largest / a.abs().max())


@pytest.mark.parametrize("kind", postnorm_models.KINDS)
def test_two_neurons_give_equal_outputs(kind):
    *_, swapped, count, keys = postnorm_models.KINDS[kind]
    model = postnorm_models.build(kind)
    batch = postnorm_models.batch(model)
    inputs = postnorm_models.batch(model, seed=7, rows=3, length=31)
    expected = outputs(model, inputs)

    conversion = convert.exact_post_norm(model, batch)

    norms = conversion.report.norms
    paths = [norm.path for norm in norms if norm.becomes_rms]
    assert len(paths) == swapped
    assert len(norms) == count
    for key in keys:
        before = getattr(model.config, key)
        assert conversion.config[key] == before + 2
    result = postnorm_models.built(conversion, model)
    assert difference(expected, outputs(result, inputs)) <= 1e-12
    report = patch_model(result)
    converted = [norm.path for norm in report.swapped if norm.converted]
    assert sorted(converted) == sorted(paths)
    assert difference(expected, outputs(result, inputs)) <= 1e-12


def test_least_squares_come_near_as_rms_norm_and_stay_equal_as_layer_norm():
    model = postnorm_models.build("bert")
    batches = []
    for seed in range(5):
        batches.append(postnorm_models.batch(model, seed, rows=8, length=32))
    conversion = convert.fit_post_norm(model, batches)
    measured = conversion.report.measured
    fit = measured["fit"]
    naive = measured["naive"]
    assert fit["relative_rms"] < 0.25 * naive["relative_rms"]
    inputs = postnorm_models.batch(model, seed=20)
    expected = outputs(model, inputs)
    result = postnorm_models.built(conversion, model)
    assert difference(expected, outputs(result, inputs)) <= 1e-12
    for norm in patch_model(result).swapped:
        assert norm.converted
    assert 1e-9 < difference(expected, outputs(result, inputs)) < 0.5


def test_what_two_neurons_do_not_serve_is_refused():
    model = postnorm_models.build("bert", hidden_act="tanh")
    with pytest.raises(ConversionRefused, match=r"act\(z\) - act\(-z\) is not z"):
        convert.exact_post_norm(model)


def test_the_script_writes_a_checkpoint(tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(demo_path("gpt2"))
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = BertModel(config)
    src = tmp_path / "src"
    dst = tmp_path / "dst"
    text = tmp_path / "text.txt"
    model.save_pretrained(src)
    tokenizer.save_pretrained(src)
    text.write_text("a line of a text\n" * 9)
    arguments = [str(src), str(dst), "--text", str(text)]
    assert convert.main(arguments) == 0
    assert "BertModel, fit" in capsys.readouterr().out
    written = (dst / "config.json").read_text()
    record = json.loads(written)["hf_rmsnorm"]
    assert record["approximate"]
    assert record["measured"]["fit"]["rows"] > 0
    converted = BertModel.from_pretrained(dst)
    report = patch_model(converted)
    assert any(norm.converted for norm in report.swapped)
    with pytest.raises(SystemExit):
        convert.main(arguments)
    assert "exists already" in capsys.readouterr().err
