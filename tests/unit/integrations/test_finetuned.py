"""A converted model in fine-tuning: kept centred step by step, or trained as RMSNorm and marked so."""

import copy
import json
import os
import subprocess
import sys
import warnings

import pytest
import tiny_models
import torch
from places import HELPERS, PYTHONPATH
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_rmsnorm import Recentre, convert_checkpoint, patch_model, train_as_rms, unpatch_model, use_backend
from hf_rmsnorm.cli.main import main
from hf_rmsnorm.demo import demo_path
from hf_rmsnorm.patching.converted import conversion_of
from hf_rmsnorm.record import RECORD_KEY, is_centred

peft = pytest.importorskip("peft", reason="adapters come with peft, of scripts/requirements")

TEXT = "The with statement wraps the execution of a block with methods that a context manager defines. " * 12
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
    sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmo", **sizes, eos_token_id=2))
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
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(steps):
        batch = ids.roll(-2 * step, 0)[:2]
        with use_backend("reference"):
            model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after()
    return optimizer


def gaps(folder, ids):
    """max |RMSNorm - LayerNorm| over max |logits| in float32 and in float64: patched, and as it loads alone."""
    found = []
    for dtype in (torch.float32, torch.float64):
        expected = logits(load(folder).to(dtype), ids)
        model = load(folder)
        assert all(record.converted for record in patch_model(model).swapped)
        found.append(float((logits(model.to(dtype), ids) - expected).abs().max() / expected.abs().max()))
    return found


@pytest.mark.full
def test_a_hundred_recentred_adamw_steps_keep_layer_norm_and_rms_norm_equal(demo, tmp_path):
    folder, ids = demo
    model = load(folder)
    start = logits(model, ids[:2])
    patch_model(model)
    train(model, 100, ids, Recentre(model), lr=3e-4)
    model.save_pretrained(tmp_path)
    assert (logits(load(tmp_path), ids[:2]) - start).abs().max() > 1.0, "nothing was trained"
    fresh, trained = gaps(folder, ids[:2]), gaps(tmp_path, ids[:2])
    # Both are roundings to float32: of the activations, and of the centred weights.
    assert trained[0] <= 1.5 * fresh[0] + 2**-23
    assert trained[1] <= 2**-23 and fresh[1] <= 2**-23


@pytest.mark.full
def test_a_hundred_adamw_steps_alone_move_it(demo, tmp_path):
    folder, ids = demo
    model = load(folder)
    train(model, 100, ids, lr=3e-4)
    model.save_pretrained(tmp_path)
    report = patch_model(load(tmp_path))
    assert not any(record.converted for record in report.swapped)
    assert "no longer has zero mean" in report.swapped[0].notes
    config = json.loads((tmp_path / "config.json").read_text())
    config[RECORD_KEY]["computes"] = "rms_norm"  # which it is not: what that would cost
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert min(gaps(tmp_path, ids[:2])) > 1e-3


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


def test_dropout_leaves_a_mean_in_the_stream_while_training_alone(small):
    model = load(small, resid_pdrop=0.3)
    outputs = {}
    for mode in (True, False):
        for patch in (False, True):
            (patch_model if patch else unpatch_model)(model.train(mode))
            torch.manual_seed(0)
            with torch.no_grad(), use_backend("reference"):
                outputs[patch] = model(IDS).logits
        difference = (outputs[True] - outputs[False]).abs().max()
        assert difference > 1e-3 if mode else difference < 1e-5


def test_what_is_centred_keeps_its_bytes_until_a_step_changes_it(small):
    model = load(small)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    recentre = Recentre(model)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    model.requires_grad_(False)
    with torch.no_grad():
        model.transformer.wte.weight.add_(1.0)
    recentre()
    assert torch.equal(model.transformer.wte.weight, before["transformer.wte.weight"] + 1.0), "it is frozen"


def test_parameters_in_bfloat16_are_centred_in_bfloat16(small):
    model = load(small, dtype=torch.bfloat16)
    recentre = Recentre(model)
    optimizer = train(model, 5, after=recentre, lr=1e-2)
    assert model.dtype == torch.bfloat16 and not conversion_of(model).why_not
    assert set(map(id, optimizer.state)) == set(map(id, model.parameters()))


@pytest.mark.parametrize("targets", [["c_proj"], ["c_attn", "c_proj", "c_fc", "wte"]])
def test_adapters_on_writers_are_kept_centred(small, targets, tmp_path):
    config = peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=True)
    for keep in (False, True):
        model = peft.get_peft_model(load(small), config)
        train(model, 5, after=Recentre(model) if keep else None, lr=1e-1)
        assert bool(conversion_of(model).why_not) == (not keep)
        if keep:
            expected = logits(model.double())
            assert all(record.converted for record in patch_model(model.float()).swapped)
            model.double()
            torch.testing.assert_close(logits(model), expected, rtol=1e-6, atol=1e-6)


def test_wrapped_models_are_found_and_a_stale_object_does_not_matter(small):
    model = load(small)
    recentre = Recentre(torch.compile(torch.nn.Sequential(model), backend="eager"))
    weight = model.transformer.wte.weight
    model.transformer.wte.weight = torch.nn.Parameter(weight + 1.0)
    recentre()
    assert is_centred(model.transformer.wte.weight, 1, 64, None)


def test_what_cannot_be_kept_centred_is_refused_in_one_line(small):
    with pytest.raises(ValueError, match="records no conversion: make a checkpoint with hf-rmsnorm convert"):
        Recentre(tiny_models.build("gpt2"))
    with pytest.raises(ValueError, match="records no conversion"):
        train_as_rms(tiny_models.build("llama"))
    for function in (Recentre, train_as_rms):
        with pytest.raises(TypeError, match=f"{function.__name__} needs a torch.nn.Module, got OrderedDict: load"):
            function(load(small).state_dict())
    hooked = load(small)
    hooked.transformer.h[0].mlp.c_proj.register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(ValueError, match="cannot be kept centred: transformer.h.0.mlp.c_proj has a hook"):
        Recentre(hooked)
    soft = peft.get_peft_model(load(small), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="is outside of the GPT2LMHeadModel"):
        Recentre(soft)
    dora = peft.LoraConfig(r=2, target_modules=["c_proj"], fan_in_fan_out=True, use_dora=True)
    with pytest.raises(ValueError, match="in a way that can give it a mean"):
        Recentre(peft.get_peft_model(load(small), dora))
    model = load(small)
    recentre = Recentre(model)
    weight = model.transformer.wte.weight
    weight.data, kept = torch.empty(0), weight.data  # as ZeRO-3 leaves it between forwards
    with pytest.raises(ValueError, match="transformer.wte.weight is not here whole"):
        recentre()
    weight.data = kept
    copies = torch.optim.AdamW([p.detach().clone() for p in model.parameters()])
    with pytest.raises(ValueError, match="updates copies of the parameters, and not transformer"):
        recentre.check_optimizer(copies)
    recentre.check_optimizer(torch.optim.AdamW(model.parameters()))
    recentre.check_optimizer(torch.optim.AdamW([model.transformer.ln_f.weight]))  # the others stay where they are
    mark(model)
    with pytest.raises(ValueError, match="was trained as RMSNorm: its weights may have any mean"):
        Recentre(model)


@pytest.mark.full
def test_two_processes_keep_what_one_does_under_ddp_and_fully_shard(small, tmp_path):
    script = HELPERS / "recentre_run.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store"), str(small), str(converted_olmo(tmp_path))],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def mark(model):
    with pytest.warns(UserWarning, match="trained as RMSNorm") as warned:
        train_as_rms(model)
    (said,) = warned
    return said


def test_trained_as_rms_norm_is_recorded_and_honoured_after_loading(small, tmp_path):
    model = load(small)
    said = mark(model)
    assert said.filename == __file__ and "\n" not in str(said.message)
    assert "computes LayerNorm" in str(said.message) and "loaded without hf_rmsnorm.patch_model" in str(said.message)
    assert "hf-rmsnorm convert FOLDER DST --target native" in str(said.message)
    assert all(record.converted for record in patch_model(model).swapped)
    train(model, 10, lr=1e-2)
    expected = logits(model)
    model.save_pretrained(tmp_path / "trained")

    loaded = load(tmp_path / "trained")
    assert (logits(loaded) - expected).abs().max() > 1e-2, "a plain load computes something else"
    for report in (patch_model(loaded), patch_model(loaded)):  # whoever goes on with it reads so in the report
        assert all(record.converted for record in report.swapped)
        assert "trained so, and a LayerNorm where it is loaded without a patch" in str(report)
    assert torch.equal(logits(loaded), expected)
    loaded.save_pretrained(tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "trained" / name).read_bytes()
    assert type(loaded) is type(load(small)) and type(loaded.transformer) is type(load(small).transformer)


def test_a_model_is_saved_in_silence(small, tmp_path):
    marked = load(small)
    mark(marked)
    for model in (load(small), tiny_models.build("llama"), marked):
        patch_model(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.save_pretrained(tmp_path)


def test_a_model_that_has_moved_cannot_become_one_trained_as_rms_norm(small):
    model = load(small)
    train(model, 10, lr=1e-2)
    before = copy.deepcopy(model.config.to_dict())
    with pytest.raises(ValueError, match="would compute something else than it does now: transformer.* no longer has"):
        train_as_rms(model)
    assert model.config.to_dict() == before


def test_an_adapter_trained_as_rms_norm_needs_its_base_marked_first(small, tmp_path):
    model = peft.get_peft_model(load(small), peft.LoraConfig(r=2, target_modules=["c_proj"], fan_in_fan_out=True))
    mark(model)
    patch_model(model)
    train(model, 5, lr=1e-1)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    base = load(small)
    mark(base)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    patch_model(loaded)
    assert torch.equal(logits(loaded), expected)
    merged = loaded.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = load(tmp_path / "merged")
    patch_model(again)
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-4)


def verified(capsys, folder):
    assert main(["verify", str(folder), "--max-tokens", "8", "--max-new-tokens", "2"]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.full
def test_verify_says_which_it_found(small, tmp_path, capsys):
    assert "converted and centred: 5 of its LayerNorms run as RMSNorm" in verified(capsys, small)
    model = load(small)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight.add_(1e-2)
    model.save_pretrained(tmp_path / "moved")
    out = verified(capsys, tmp_path / "moved")
    assert "converted, but each norm that the conversion recorded stays the LayerNorm that it is" in out
    assert "transformer.h.1.mlp.c_proj.weight no longer has zero mean" in out
    model.config.hf_rmsnorm["computes"] = "rms_norm"
    model.save_pretrained(tmp_path / "trained")
    out = verified(capsys, tmp_path / "trained")
    assert "converted, then trained as RMSNorm, as its config.json says" in out and ": PASS " in out
    assert main(["verify", str(tmp_path / "trained"), "--json", "--max-tokens", "8", "--max-new-tokens", "0"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert found["conversion"] == "trained" and found["conversion_doubt"] == ""
    lora = peft.LoraConfig(r=2, target_modules=["c_proj"], fan_in_fan_out=True)
    peft.get_peft_model(load(small), lora).save_pretrained(tmp_path / "adapter")
    assert main(["verify", str(tmp_path / "adapter")]) == 2
    assert "adapter is an adapter: merge_and_unload it into its base" in capsys.readouterr().err


def test_the_native_target_of_a_model_trained_as_rms_norm_is_what_it_computes(tmp_path, capsys):
    model = load(converted_olmo(tmp_path))
    mark(model)
    patch_model(model)
    train(model, 5, lr=1e-2)
    expected = logits(model)
    model.save_pretrained(tmp_path / "trained")
    assert main(["convert", str(tmp_path / "trained"), str(tmp_path / "native"), "--target", "native"]) == 0
    native = load(tmp_path / "native")
    assert type(native).__name__ == "LlamaForCausalLM"
    torch.testing.assert_close(logits(native), expected, rtol=1e-5, atol=1e-5)
    assert main(["convert", str(tmp_path / "trained"), str(tmp_path / "same")]) == 2
    assert "--target native" in capsys.readouterr().err
