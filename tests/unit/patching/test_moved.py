"""A converted model that is patched and then moves: one warning, at the first forward that can tell."""

import copy
import pickle
import warnings

import pytest
import torch
from conversion_models import config_of
from transformers import AutoModelForCausalLM

from hf_rmsnorm import Recentre, convert_checkpoint, patch_model, patched, train_as_rms, unpatch_model

IDS = torch.arange(3, 35).view(2, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of("gpt2")).save_pretrained(folder / "source")
    convert_checkpoint(folder / "source", folder / "converted", verify=False)
    return folder / "converted"


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def step(model):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()


def silent(model, **inputs):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this converted")
        with torch.no_grad():
            model(**(inputs or {"input_ids": IDS}))
    return True


def test_a_model_that_stays_as_it_is_says_nothing(model):
    patch_model(model)
    assert silent(model) and silent(copy.deepcopy(model)) and silent(pickle.loads(pickle.dumps(model)))
    assert silent(model, inputs_embeds=model.get_input_embeddings()(IDS))
    with torch.inference_mode():
        assert silent(model)
    model.load_state_dict(model.state_dict())
    assert silent(model) and silent(model.double())
    model.transformer.ln_f.weight.data.mul_(2)
    assert silent(model)


def test_a_step_of_an_optimizer_is_told_once(model):
    patch_model(model)
    step(model)
    with pytest.warns(UserWarning, match="this converted GPT2LMHeadModel runs as RMSNorm.*no longer has zero mean"):
        model(IDS)
    assert silent(model)
    patch_model(model)
    unpatch_model(model)
    assert silent(model) and not model._forward_pre_hooks


def test_an_adapter_that_is_added_and_trained_is_told(model):
    peft = pytest.importorskip("peft")
    patch_model(model)
    config = peft.LoraConfig(target_modules=["c_proj"], init_lora_weights=True, fan_in_fan_out=True)
    wrapped = peft.get_peft_model(model, config)
    assert silent(wrapped)  # an adapter begins with B = 0
    step(wrapped)
    with pytest.warns(UserWarning, match="lora_B.*no longer has zero mean.*convert an adapter with its base"):
        wrapped(IDS)


def test_embeddings_with_a_mean_are_told(model):
    patch_model(model)
    with pytest.warns(UserWarning, match="inputs_embeds that it is given have a mean"):
        model(inputs_embeds=torch.randn(2, 4, 32) + 1)


def test_ways_of_training_it_say_nothing(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    patch_model(model)
    recentre = Recentre(model)
    step(model)
    recentre()
    assert silent(model)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.warns(UserWarning):
        train_as_rms(model)
    patch_model(model)
    step(model)
    assert silent(model)


def test_it_goes_with_the_patch(model):
    with patched(model):
        assert len(model._forward_pre_hooks) == 1
        with patched(model):
            assert len(model._forward_pre_hooks) == 1
        assert len(model._forward_pre_hooks) == 1
    assert not model._forward_pre_hooks
