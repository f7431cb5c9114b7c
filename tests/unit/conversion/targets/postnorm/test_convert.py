"""Post-norm models: two neurons make FFN and embedding norms RMSNorms exactly, least squares the rest nearly."""

import json

import postnorm_models
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

from hf_rmsnorm import patch_model, unpatch_model
from hf_rmsnorm.conversion.plan import ConversionRefused
from hf_rmsnorm.conversion.targets.postnorm.convert import exact_post_norm, fit_post_norm
from hf_rmsnorm.conversion.twin.twin import give_weights
from hf_rmsnorm.record import recorded_norms, uncentred

KINDS = list(postnorm_models.KINDS)


def outputs(model, inputs):
    with torch.no_grad():
        first = model(**inputs)[0]
    mask = inputs["attention_mask"]
    return first[mask.bool()] if first.shape[:2] == mask.shape else first


def as_rms(conversion, model):
    """The converted model, patched: its norms compute what the record says."""
    result = postnorm_models.built(conversion, model)
    assert any(s.converted for s in patch_model(result).swapped)
    return result


def difference(a, b):
    return float((a - b).abs().max() / a.abs().max())


@pytest.fixture(scope="module", params=KINDS)
def converted(request, tmp_path_factory):
    """(kind, model, its exact conversion, the folder it was saved to); float64."""
    model = postnorm_models.build(request.param)
    conversion = exact_post_norm(model, postnorm_models.batch(model))
    folder = tmp_path_factory.mktemp(request.param)
    postnorm_models.built(conversion, model).save_pretrained(folder)
    return request.param, model, conversion, folder


def load(kind, folder, dtype=torch.float64):
    return postnorm_models.KINDS[kind][0].from_pretrained(folder, dtype=dtype).eval()


def test_exact_outputs_are_equal(converted):
    """On inputs that the conversion never saw, as LayerNorm in the stock class and as RMSNorm."""
    kind, model, conversion, folder = converted
    inputs = postnorm_models.batch(model, seed=7, rows=3, length=31)
    expected = outputs(model, inputs)
    assert difference(expected, outputs(load(kind, folder), inputs)) <= 1e-12
    assert difference(expected, outputs(as_rms(conversion, model), inputs)) <= 1e-12
    assert conversion.report.stock <= 1e-12 and conversion.report.rms <= 1e-12


def test_exact_norms_and_config(converted):
    kind, model, conversion, folder = converted
    *_, swapped, count, keys = postnorm_models.KINDS[kind]
    report = conversion.report
    assert (sum(n.becomes_rms for n in report.norms), len(report.norms)) == (swapped, count)
    assert all(n.reason for n in report.norms if not n.becomes_rms)
    stays = [n.path for n in report.norms if not n.becomes_rms]
    assert all("att" in path or "lm_head" in path or "sa_layer_norm" in path for path in stays)
    assert sorted(k for k, v in conversion.config.items() if type(v) is int) == keys
    assert all(conversion.config[key] == getattr(model.config, key) + 2 for key in keys)
    saved = json.loads((folder / "config.json").read_text())
    assert saved["hf_rmsnorm"] == conversion.config["hf_rmsnorm"]
    assert json.loads(json.dumps(report.to_dict()))["neurons"] == report.neurons > 0
    assert f"{swapped} of {count} norms become RMSNorm" in str(report)


def test_patching_follows_the_record(converted):
    kind, model, conversion, folder = converted
    inputs = postnorm_models.batch(model, seed=8)
    expected, loaded = outputs(model, inputs), load(kind, folder)
    report = patch_model(loaded)
    assert {s.path for s in report.swapped if s.converted} == {n.path for n in conversion.report.norms if n.becomes_rms}
    assert all(s.formula.centered != s.converted for s in report.swapped)
    assert difference(expected, outputs(loaded, inputs)) <= 1e-12


def test_a_neuron_or_a_writer_that_has_moved_keeps_layer_norm(converted):
    """One element of the last neuron, of either linear module, and one of the neurons that were there before."""
    kind, model, conversion, folder = converted
    record, loaded = conversion.config["hf_rmsnorm"], load(kind, folder)
    parameters = {name: p.data for name, p in loaded.named_parameters(remove_duplicate=False)}
    assert uncentred(parameters, record) == []
    old = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
    grown = [name for name in parameters if parameters[name].shape != old[name]]
    assert len(grown) == 3 * conversion.report.neurons
    for name in grown:
        p = parameters[name]
        axis = next(a for a in range(p.ndim) if p.shape[a] != old[name][a])
        writes = p.ndim == 2 and axis == 1
        for place in (-1, 0) if writes else (-1,):
            element = p.movedim(axis, 0)[place].reshape(-1)[:1] if axis == 0 else p[:1, place]
            before = element.clone()
            element += 1e-6
            assert uncentred(parameters, record) == [name], (name, place)
            element.copy_(before)
    assert uncentred(parameters, record) == []
    parameters[grown[0]] += 1e-6
    report = patch_model(loaded)
    assert not any(s.converted for s in report.swapped)
    assert all(grown[0] in s.notes for s in report.swapped if s.path in recorded_norms(record, [s.path]))


@pytest.mark.parametrize(("kind", "auto"), [("bert", AutoModelForMaskedLM), ("roberta", AutoModel)])
def test_the_record_is_followed_with_another_head(kind, auto, tmp_path):
    """BERT was saved without one, RoBERTa with one."""
    model = postnorm_models.build(kind)
    conversion = exact_post_norm(model)
    postnorm_models.built(conversion, model).save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path, dtype=torch.float64).eval()
    report = patch_model(loaded)
    swapped = {s.path.removeprefix(f"{kind}.") for s in report.swapped if s.converted}
    assert swapped == {n.path.removeprefix(f"{kind}.") for n in conversion.report.norms if n.becomes_rms}
    next(p for n, p in loaded.named_parameters() if "word_embeddings" in n).data[0, 0] += 1e-6
    unpatch_model(loaded)
    assert not any(s.converted for s in patch_model(loaded).swapped)


def test_no_head_is_tied_to_a_centred_table(tmp_path):
    model = postnorm_models.build("bert")
    assert model.config.tie_word_embeddings and model.get_output_embeddings() is None
    postnorm_models.built(exact_post_norm(model), model).save_pretrained(tmp_path)
    _, info = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert "cls.predictions.decoder.weight" in info["missing_keys"]


def test_the_original_is_not_changed():
    model = postnorm_models.build("bert")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    config = model.config.to_dict()
    batches = [postnorm_models.batch(model, seed) for seed in range(5)]
    exact_post_norm(model)
    fit_post_norm(model, batches)
    assert model.config.to_dict() == config and not model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("model_type", "config", "norms"),
    [
        ("electra", {**postnorm_models.BERT, "embedding_size": 24}, (3, 5)),
        ("deberta-v2", {**postnorm_models.BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, (3, 5)),
        ("marian", {**postnorm_models.BART, "pad_token_id": 1}, (4, 10)),  # its position tables are computed
        ("xlnet", {"vocab_size": 128, "d_model": 48, "n_layer": 2, "n_head": 4, "d_inner": 72}, (2, 4)),
    ],
)
def test_architectures_that_nobody_named(model_type, config, norms):
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **config), dtype=torch.float64).eval()
    give_weights(model, seed=1)
    report = exact_post_norm(model).report
    assert (sum(n.becomes_rms for n in report.norms), len(report.norms)) == norms
    assert report.neurons >= 2 and max(report.stock, report.rms) <= 1e-12


def test_a_width_that_is_no_key_of_the_config_is_refused_by_name():
    config = AutoConfig.for_model("xlm", vocab_size=128, emb_dim=48, n_layers=2, n_heads=4, max_position_embeddings=64)
    model = AutoModel.from_config(config, dtype=torch.float64).eval()
    give_weights(model, seed=1)
    with pytest.raises(ConversionRefused, match=r"no config key widens ffns\.0\.lin1 by 2"):
        exact_post_norm(model)


@pytest.mark.parametrize("act", ["relu", "silu", "gelu_new", "quick_gelu"])
def test_activations_that_serve(act):
    model = postnorm_models.build("bert", hidden_act=act)
    assert exact_post_norm(model).report.rms <= 1e-12


@pytest.mark.parametrize("act", ["tanh", "relu2", "mish"])
def test_an_activation_that_does_not_serve_is_refused_by_name(act):
    model = postnorm_models.build("bert", hidden_act=act)
    with pytest.raises(ConversionRefused, match=r"between encoder\.layer\.0\.intermediate\.dense and .* is not z"):
        exact_post_norm(model)
    assert fit_post_norm(model, [postnorm_models.batch(model, s) for s in range(5)]).report.neurons == 0


def test_a_pre_norm_model_is_refused():
    model = postnorm_models.build("opt-350m", do_layer_norm_before=True, word_embed_proj_dim=48)
    with pytest.raises(ConversionRefused, match="no post-norm model"):
        exact_post_norm(model)


def test_another_config_value_equal_to_the_ffn_width_is_left_alone():
    model = postnorm_models.build("bert", intermediate_size=48, max_position_embeddings=48)
    conversion = exact_post_norm(model)
    assert {k: v for k, v in conversion.config.items() if type(v) is int} == {"intermediate_size": 50}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bert", "bart"])
def test_narrow_dtypes_stay_within_their_own_noise(kind, dtype):
    model = postnorm_models.build(kind, dtype)
    wide = postnorm_models.build(kind, dtype).double()
    conversion = exact_post_norm(model)
    assert all(t.dtype == dtype for t in conversion.tensors.values())
    loaded = postnorm_models.built(conversion, model)
    inputs = postnorm_models.batch(model, seed=9, rows=16)
    expected, own = outputs(wide, inputs), outputs(model, inputs).double()
    for patched in (False, True):
        if patched:
            assert any(s.converted for s in patch_model(loaded).swapped)
        error = (outputs(loaded, inputs).double() - expected).square().mean().sqrt()
        assert error <= 1.5 * (own - expected).square().mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_neurons_add_up_to_one_mean_in_every_dtype(dtype):
    """1/48 is off by a thousandth in bfloat16; two weights are chosen whose product is not, there and in their own."""
    conversion = exact_post_norm(postnorm_models.build("bert", dtype))
    record = conversion.config["hf_rmsnorm"]["neurons"]
    c, minus_c = record["encoder.layer.*.intermediate.dense.weight"]["values"]
    minus_o, o = record["encoder.layer.*.output.dense.weight"]["values"]
    assert (minus_c, minus_o) == (-c, -o)
    assert torch.equal(
        conversion.tensors["encoder.layer.1.intermediate.dense.weight"][72], torch.full((48,), c).to(dtype)
    )
    assert abs(c * o * 48 - 1) <= max(torch.finfo(dtype).eps, 1e-4 if dtype.itemsize == 2 else 0)
    narrow = [float(torch.tensor(x, dtype=torch.float64).bfloat16()) for x in (c, o, 1 / 48)]
    assert abs(narrow[0] * narrow[1] * 48 - 1) < 1e-4 < abs(narrow[2] * 48 - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_fit_is_near_as_rms_and_equal_as_layer_norm(kind, tmp_path):
    model = postnorm_models.build(kind)
    conversion = fit_post_norm(model, [postnorm_models.batch(model, seed, rows=8, length=32) for seed in range(5)])
    report, record = conversion.report, conversion.config["hf_rmsnorm"]
    assert record["computes"] == "rms_norm" and record["approximate"] is True
    assert record["measured"] == report.measured
    fit, naive = report.measured["fit"], report.measured["naive"]
    assert fit["relative_rms"] < 0.25 * naive["relative_rms"] and fit["cosine_mean"] > 0.95
    if "other" in report.measured:
        assert fit["relative_rms"] <= report.measured["other"]["relative_rms"]
    swapped = {n.path for n in report.norms if n.becomes_rms}
    assert {n.path for n in report.norms} - swapped <= {"lm_head.layer_norm"}
    inputs = postnorm_models.batch(model, seed=20)
    expected = outputs(model, inputs)
    postnorm_models.built(conversion, model).save_pretrained(tmp_path)
    loaded = load(kind, tmp_path)
    assert difference(expected, outputs(loaded, inputs)) <= 1e-12
    assert {s.path for s in patch_model(loaded).swapped if s.converted} == swapped
    assert 1e-9 < difference(expected, outputs(loaded, inputs)) < 0.5


def test_fit_measures_what_was_held_out():
    """The figures of the report are those of the checkpoint that comes out, on the batches that were given for it."""
    model = postnorm_models.build("bert")
    batches = [postnorm_models.batch(model, seed) for seed in range(4)]
    held_out = [postnorm_models.batch(model, seed=30)]
    conversion = fit_post_norm(model, batches + held_out)
    rms = as_rms(conversion, model)
    with torch.no_grad():
        expected, got = (m(**held_out[0]) for m in (model, rms))
    mask = held_out[0]["attention_mask"].bool()
    rows = [(e[mask], g[mask]) for e, g in [(expected[0], got[0])]] + [(expected[1], got[1])]
    cosines = torch.cat([torch.cosine_similarity(e, g, dim=-1) for e, g in rows])
    fit = conversion.report.measured["fit"]
    assert fit["rows"] == cosines.numel()
    assert fit["cosine_min"] == pytest.approx(float(cosines.min()), abs=1e-9)
    assert fit["cosine_mean"] == pytest.approx(float(cosines.mean()), abs=1e-9)


def test_fit_finds_a_mean_that_is_linear_in_the_writers_input():
    """With the skip silenced and a writer that adds a mean, nothing is left after the fit but rounding."""
    model = postnorm_models.build("bert")
    with torch.no_grad():
        for layer in (model.embeddings, *(x.output for x in model.encoder.layer)):
            weight, bias = layer.LayerNorm.weight, layer.LayerNorm.bias
            weight.fill_(1.0)  # so the skip has no mean but the bias's, which the average takes off
            bias.copy_(torch.linspace(0, 1, len(bias)))
        for layer in model.encoder.layer:
            layer.attention.output.LayerNorm.weight.fill_(1.0)
    batches = [postnorm_models.batch(model, seed) for seed in range(5)]
    measured = fit_post_norm(model, batches).report.measured
    assert measured["fit"]["relative_rms"] <= measured["other"]["relative_rms"] < 1e-5  # with the neurons and without
    assert measured["naive"]["relative_rms"] > 1e-2


def test_too_few_batches():
    model = postnorm_models.build("bert")
    with pytest.raises(ValueError, match="needs 5 batches"):
        fit_post_norm(model, [postnorm_models.batch(model)])
