"""A converted model in fine-tuning: kept centred step by step, or trained as RMSNorm
and marked so.
"""

import copy

import pytest
import recentre_run
import tiny_models
import torch
from parallel_runs import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_rmsnorm import (
    Recentre,
    convert_checkpoint,
    patch_model,
    train_as_rms,
    use_backend,
)
from hf_rmsnorm.converted.follow import conversion_of
from hf_rmsnorm.demo import demo_path

peft = pytest.importorskip(
    "peft", reason="adapters come with peft, of scripts/requirements"
)

TEXT = (
    "The with statement wraps the execution of a block with methods that a context manager defines. "
    * 12
)
IDS = tiny_models.token_ids(2, 16)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """(folder of the converted demo GPT-2, token ids of shape (8, 64))."""
    folder = tmp_path_factory.mktemp("demo") / "converted"
    convert_checkpoint(demo_path("gpt2"), folder, verify=False)
    ids = AutoTokenizer.from_pretrained(demo_path("gpt2"))(TEXT)["input_ids"]
    return folder, torch.tensor(ids[: 8 * 64]).view(8, 64)


def converted_olmo(folder):
    """Folder of a small converted OLMo, whose writers are `nn.Linear`s."""
    sizes = dict(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("olmo", **sizes, eos_token_id=2)
    )
    model.save_pretrained(folder / "source")
    convert_checkpoint(folder / "source", folder / "converted", verify=False)
    return folder / "converted"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Folder of a small converted GPT-2."""
    return tiny_models.converted("gpt2", tmp_path_factory.mktemp("small"))


def load(folder, **how):
    return AutoModelForCausalLM.from_pretrained(folder, **how)


def logits(model, ids=IDS):
    with torch.no_grad(), use_backend("reference"):
        return model.eval()(ids).logits


def train(model, steps, ids=IDS, after=None, lr=1e-3):
    """AdamW on what needs gradients; `after` is called after each step."""
    model.train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=lr
    )
    for step in range(steps):
        batch = ids.roll(-2 * step, 0)[:2]
        with use_backend("reference"):
            model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after()
    return optimizer


def all_converted(report):
    return all(record.converted for record in report.swapped)


def gaps(folder, ids):
    """max |RMSNorm - LayerNorm| over max |logits| in float32 and in float64: patched,
    and as it loads alone.
    """
    gaps = []
    for dtype in (torch.float32, torch.float64):
        expected = logits(load(folder).to(dtype), ids)
        model = load(folder)
        assert all_converted(patch_model(model))
        difference = (logits(model.to(dtype), ids) - expected).abs().max()
        gaps.append(float(difference / expected.abs().max()))
    return gaps


@pytest.mark.full
def test_a_hundred_recentred_adamw_steps_keep_layer_norm_and_rms_norm_equal(
    demo, tmp_path
):
    folder, ids = demo
    model = load(folder)
    start = logits(model, ids[:2])
    patch_model(model)
    train(model, 100, ids, Recentre(model), lr=3e-4)
    model.save_pretrained(tmp_path)
    change = (logits(load(tmp_path), ids[:2]) - start).abs().max()
    assert change > 1.0, "nothing was trained"
    fresh, trained = gaps(folder, ids[:2]), gaps(tmp_path, ids[:2])
    # Both are roundings to float32: of the activations, and of the centred weights.
    assert trained[0] <= 1.5 * fresh[0] + 2**-23
    assert trained[1] <= 2**-23 and fresh[1] <= 2**-23


def test_layer_norm_does_not_see_it_and_what_has_moved_is_mended(small):
    model = load(small)
    train(model, 10, lr=1e-2)
    expected = logits(model.double())
    assert "no longer has zero mean" in conversion_of(model).why_not
    Recentre(model)
    assert not conversion_of(model).why_not
    torch.testing.assert_close(logits(model), expected, rtol=1e-9, atol=1e-9)
    patch_model(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-9, atol=1e-9)


def test_what_is_centred_keeps_its_bytes_until_a_step_changes_it(small):
    model = load(small)
    before = copy.deepcopy(model.state_dict())
    recentre = Recentre(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    model.requires_grad_(False)
    weight = model.transformer.wte.weight
    weight.add_(1.0)
    recentre()
    expected = before["transformer.wte.weight"] + 1.0
    assert torch.equal(weight, expected), "it is frozen"


@pytest.mark.parametrize("targets", [["c_proj"], ["c_attn", "c_proj", "c_fc", "wte"]])
def test_adapters_on_writers_are_kept_centred(small, targets, tmp_path):
    config = peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=True)
    for keep in (False, True):
        model = peft.get_peft_model(load(small), config)
        train(model, 5, after=Recentre(model) if keep else None, lr=1e-1)
        assert bool(conversion_of(model).why_not) == (not keep)
        if keep:
            expected = logits(model.double())
            assert all_converted(patch_model(model.float()))
            model.double()
            torch.testing.assert_close(logits(model), expected, rtol=1e-6, atol=1e-6)


def test_an_adapter_below_another_is_noticed(tmp_path):
    targets = {"target_modules": ["dense"], "r": 2}
    config = peft.LoHaConfig(init_weights=False, **targets)
    folder = tiny_models.converted("gpt_neox", tmp_path)
    model = peft.get_peft_model(load(folder), config, mixed=True)
    model.add_adapter("second", peft.LoraConfig(**targets))
    assert "in a way that can give it a mean" in conversion_of(model).why_not


def test_what_cannot_be_kept_centred_is_refused_in_one_line(small):
    with pytest.raises(
        ValueError,
        match="records no conversion: make a checkpoint with hf-rmsnorm convert",
    ):
        Recentre(tiny_models.build("gpt2"))
    with pytest.raises(ValueError, match="records no conversion"):
        train_as_rms(tiny_models.build("llama"))
    hooked = load(small)
    hooked.transformer.h[0].mlp.c_proj.register_forward_hook(
        lambda module, args, output: output + 1
    )
    with pytest.raises(
        ValueError,
        match="cannot be kept centred: transformer.h.0.mlp.c_proj has a hook",
    ):
        Recentre(hooked)
    dora = peft.LoraConfig(
        r=2, target_modules=["c_proj"], fan_in_fan_out=True, use_dora=True
    )
    with pytest.raises(ValueError, match="in a way that can give it a mean"):
        Recentre(peft.get_peft_model(load(small), dora))
    model = load(small)
    recentre = Recentre(model)
    weight = model.transformer.wte.weight
    # as ZeRO-3 leaves it between forwards
    weight.data, kept = torch.empty(0), weight.data
    with pytest.raises(ValueError, match="transformer.wte.weight is not here whole"):
        recentre()
    weight.data = kept
    copies = torch.optim.AdamW([p.detach().clone() for p in model.parameters()])
    with pytest.raises(
        ValueError, match="updates copies of the parameters, and not transformer"
    ):
        recentre.check_optimizer(copies)
    mark(model)
    with pytest.raises(
        ValueError, match="was trained as RMSNorm: its weights may have any mean"
    ):
        Recentre(model)


@pytest.mark.full
def test_two_processes_keep_what_one_does_under_ddp_and_fully_shard(
    small, tmp_path, monkeypatch
):
    folders = small, converted_olmo(tmp_path)
    run_ranks(recentre_run.work, tmp_path, monkeypatch, *folders)


def mark(model):
    with pytest.warns(UserWarning, match="trained as RMSNorm") as warned:
        train_as_rms(model)
    (said,) = warned
    return said


def test_the_warning_of_train_as_rms_has_the_cure(small):
    said = mark(load(small))
    assert said.filename == __file__
    text = str(said.message)
    assert "\n" not in text
    assert "computes LayerNorm" in text
    assert "hf-rmsnorm convert FOLDER DST --target native" in text


def test_trained_as_rms_norm_is_recorded_and_honoured_after_loading(small, tmp_path):
    model = load(small)
    mark(model)
    assert all_converted(patch_model(model))
    train(model, 10, lr=1e-2)
    expected = logits(model)
    model.save_pretrained(tmp_path / "trained")

    loaded = load(tmp_path / "trained")
    difference = (logits(loaded) - expected).abs().max()
    assert difference > 1e-2, "a plain load computes something else"
    for _ in range(2):
        report = patch_model(loaded)
        assert all_converted(report)
        assert "trained so, and a LayerNorm where it is loaded without" in str(report)
    assert torch.equal(logits(loaded), expected)
    loaded.save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        again, first = (tmp_path / f / name for f in ("again", "trained"))
        assert again.read_bytes() == first.read_bytes()


def test_a_model_that_has_moved_cannot_become_one_trained_as_rms_norm(small):
    model = load(small)
    train(model, 10, lr=1e-2)
    before = copy.deepcopy(model.config.to_dict())
    with pytest.raises(
        ValueError,
        match="would compute something else than it does now: transformer.* no longer has",
    ):
        train_as_rms(model)
    assert model.config.to_dict() == before
