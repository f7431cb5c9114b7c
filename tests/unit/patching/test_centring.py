"""Converted checkpoints whose stream has a mean that no weight holds: where it is taken off, and when it is not."""

import copy
import io
import pickle

import pytest
import torch
from conversion_models import CENTRED_IN_RUN, config_of
from transformers import BloomForCausalLM, WhisperForCausalLM, WhisperForConditionalGeneration

import hf_rmsnorm
from hf_rmsnorm import convert_checkpoint, patch_model, patched, unpatch_model, use_backend, verify_equivalence
from hf_rmsnorm.patching.centring import without_mean
from hf_rmsnorm.patching.moved import MovedCheck
from hf_rmsnorm.verification.recorded import as_recorded

IDS = torch.arange(3, 35).view(2, 16)
INPUTS = {"bloom": {"input_ids": IDS}, "whisper": {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": IDS}}
CLASSES = {"bloom": BloomForCausalLM, "whisper": WhisperForConditionalGeneration}
PLACES = {"bloom": "transformer.word_embeddings_layernorm", "whisper": "model.encoder.layers.0"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By name: (source, converted) checkpoints with means everywhere."""
    made = {}
    for name, cls in CLASSES.items():
        folder = tmp_path_factory.mktemp(name)
        model = cls(config_of(name, CENTRED_IN_RUN)).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder / "source")
        convert_checkpoint(folder / "source", folder / "converted", verify=False)
        made[name] = folder / "source", folder / "converted"
    return made


def load(folders, name, converted=True, dtype=torch.float32):
    return CLASSES[name].from_pretrained(folders[name][converted], dtype=dtype).eval()


def logits(model, name):
    with torch.no_grad():
        return model(**INPUTS[name]).logits


def hooks(model):
    """All but the one that watches whether the model moves."""
    found = (each for m in model.modules() for each in (m._forward_hooks, m._forward_pre_hooks))
    return [[hook for hook in each.values() if not isinstance(hook, MovedCheck)] for each in found]


both = pytest.mark.parametrize("name", sorted(CLASSES))


@pytest.mark.full
@both
@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
def test_the_logits_are_those_of_the_source(folders, name, backend):
    source = load(folders, name, converted=False)
    own, model = logits(source, name), load(folders, name)
    plain = logits(model, name)
    report = patch_model(model)
    exact = logits(copy.deepcopy(source).double(), name) if name == "bloom" else own.double()
    assert all(norm.converted for norm in report.swapped)
    assert f"put of {PLACES[name]} is taken off when the model runs" in " ".join(str(report).split())
    with use_backend(backend):
        y = logits(model, name)
    bound = 3 * (own.double() - exact).abs().max() + 1e-5 * exact.abs().max()
    assert (plain.double() - exact).abs().max() <= bound and (y.double() - exact).abs().max() <= bound


@both
def test_without_it_the_logits_would_be_others(folders, name):
    model = load(folders, name)
    expected = logits(model, name)
    patch_model(model)
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    assert (logits(model, name) - expected).abs().max() > 1e-2 * expected.abs().max()


@both
def test_undone_it_is_the_model_that_was_loaded(folders, name):
    model = load(folders, name)
    before, own = hooks(model), logits(model, name)
    with patched(model):
        patch_model(model)
        with patched(model):
            pass
        assert sum(map(len, hooks(model))) == sum(map(len, before)) + 1
        inside = logits(model, name)
    assert hooks(model) == before and torch.equal(logits(model, name), own)
    patch_model(model)
    assert torch.equal(logits(model, name), inside)
    unpatch_model(model)
    assert hooks(model) == before and torch.equal(logits(model, name), own)


def test_a_part_that_is_unpatched_does_not_give_its_mean_to_the_rest(folders):
    model = load(folders, "bloom")
    expected = logits(model, "bloom")
    patch_model(model)
    unpatch_model(model.transformer.word_embeddings_layernorm)
    torch.testing.assert_close(logits(model, "bloom"), expected, rtol=1e-4, atol=1e-4)


@both
def test_copies_and_pickles_keep_it(folders, name):
    model = load(folders, name)
    patch_model(model)
    expected = logits(model, name)
    assert torch.equal(logits(copy.deepcopy(model), name), expected)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model)), name), expected)
    file = io.BytesIO()
    torch.save(model, file)
    assert torch.equal(logits(torch.load(io.BytesIO(file.getvalue()), weights_only=False), name), expected)


def test_a_writer_that_has_moved_keeps_layer_norm_and_its_mean(folders):
    model = load(folders, "bloom")
    with torch.no_grad():
        model.transformer.h[0].mlp.dense_4h_to_h.bias.add_(1)
    before, own = hooks(model), logits(model, "bloom")
    report = patch_model(model)
    assert not any(norm.converted for norm in report.swapped) and hooks(model) == before
    torch.testing.assert_close(logits(model, "bloom"), own, rtol=1e-4, atol=1e-4)


def test_a_place_that_is_not_in_the_model_keeps_layer_norm(folders):
    model = load(folders, "bloom")
    own = logits(model, "bloom")
    record = {**model.config.hf_rmsnorm, "centred": {"transformer.gone": "output"}}
    model.config.hf_rmsnorm = record
    report = patch_model(model)
    assert "transformer.gone, where a mean is taken off, is not in this model" in str(report)
    assert not any(norm.converted for norm in report.swapped)
    torch.testing.assert_close(logits(model, "bloom"), own, rtol=1e-4, atol=1e-4)


@both
@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_a_hook_where_it_is_taken_off_keeps_layer_norm(folders, name, kind):
    model = load(folders, name)
    place = model.get_submodule(PLACES[name])
    if kind == "forward":
        place.register_forward_hook(lambda module, args, output: output + 3)
    else:
        place.register_forward_pre_hook(lambda module, args: (args[0] + 3, *args[1:]))
    own, report = logits(model, name), patch_model(model)
    assert not any(norm.converted for norm in report.swapped) and "has a hook" in str(report)
    torch.testing.assert_close(logits(model, name), own, rtol=1e-4, atol=1e-4)


def test_a_layer_that_training_may_drop_keeps_layer_norm(folders):
    model = load(folders, "whisper")
    model.config.encoder_layerdrop = 0.5
    report = patch_model(model)
    assert "training may drop model.encoder.layers.0" in " ".join(str(report).split())
    assert not any(norm.converted for norm in report.swapped)


def test_a_place_that_is_called_by_names_in_another_order(folders):
    model = load(folders, "whisper")
    patch_model(model)
    layer, x = model.model.encoder.layers[0], torch.randn(2, 6, 32)
    with torch.no_grad():
        expected = layer(x, None)
        for given in ({"hidden_states": x, "attention_mask": None}, {"attention_mask": None, "hidden_states": x}):
            assert torch.equal(layer(**given), expected)


def test_a_place_whose_module_is_exchanged_is_put_in_order(folders):
    model = load(folders, "bloom")
    patch_model(model)
    expected = logits(model, "bloom")
    unpatched = load(folders, "bloom").transformer.word_embeddings_layernorm
    model.transformer.word_embeddings_layernorm = unpatched
    torch.testing.assert_close(logits(model, "bloom"), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("part", ["transformer.h.0", "transformer.h", "transformer.ln_f"])
def test_a_part_of_a_patched_model_can_be_patched_again(folders, part):
    model = load(folders, "bloom")
    patch_model(model)
    expected, part = logits(model, "bloom"), model.get_submodule(part)
    assert patch_model(part).swapped and torch.equal(logits(model, "bloom"), expected)
    with patched(copy.deepcopy(part)) as report:
        assert all(norm.converted for norm in report.swapped)


def test_a_package_that_does_not_know_of_it_refuses_the_record(folders):
    assert load(folders, "bloom").config.hf_rmsnorm["version"] == 2


def test_another_class_of_the_checkpoint_is_inspected_as_it_is_patched(folders):
    model = WhisperForCausalLM.from_pretrained(folders["whisper"][1])
    assert "is not in this model" in " ".join(str(patch_model(model)).split())
    unpatch_model(model)
    assert hf_rmsnorm.inspect_norms(model, IDS).norms


def test_a_model_without_its_head_takes_it_off_too(folders):
    model = load(folders, "bloom").transformer
    with torch.no_grad():
        own = model(IDS).last_hidden_state
        patch_model(model)
        assert sum(map(len, hooks(model))) == 1
        torch.testing.assert_close(model(IDS).last_hidden_state, own, rtol=1e-4, atol=1e-4)


def test_norms_that_are_left_out_stay_right(folders):
    model = load(folders, "bloom")
    own = logits(model, "bloom")
    patch_model(model, exclude="transformer.h.1.*")
    torch.testing.assert_close(logits(model, "bloom"), own, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_layer_norm_model(folders):
    model, other = load(folders, "bloom"), load(folders, "bloom")
    patch_model(other)
    other.gradient_checkpointing_enable()
    for each in (model, other):
        each.train()
        each(IDS, labels=IDS).loss.backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        axis = (
            -1
            if name.endswith("word_embeddings.weight")
            else 0
            if "dense" in name or "layernorm.bias" in name
            else None
        )
        # What writes to the stream has no gradient along its mean as LayerNorm, and may have one as RMSNorm.
        a, b = (g if axis is None else without_mean(g.movedim(axis, -1)) for g in (p.grad, q.grad))
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(a.abs().max()), msg=name)


@both
def test_verify_passes_and_sees_where_it_would_not(folders, name):
    source, model = load(folders, name, converted=False), load(folders, name)
    with patched(model):
        assert verify_equivalence(source, model, [INPUTS[name]], norms=False, max_new_tokens=0).passed
    plain = as_recorded(model)
    assert torch.allclose(logits(plain, name), logits(model, name), rtol=1e-4, atol=1e-4)


def test_saved_files_are_the_same_bytes(folders, tmp_path):
    model = load(folders, "bloom")
    model.save_pretrained(tmp_path / "before")
    patch_model(model)
    model.save_pretrained(tmp_path / "after")
    for file in (tmp_path / "before").iterdir():
        assert file.read_bytes() == (tmp_path / "after" / file.name).read_bytes()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_it_rounds_once(dtype):
    x = (torch.randn(5, 64, dtype=torch.float64) + 3).to(dtype)
    y, exact = without_mean(x), x.double() - x.double().mean(-1, keepdim=True)
    assert y.dtype == dtype
    assert (y.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


def test_inspect_finds_no_mean_left(folders):
    model = load(folders, "bloom")
    assert max(norm.largest for norm in hf_rmsnorm.inspect_norms(model, IDS).norms) < 1e-6
