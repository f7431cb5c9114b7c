"""The record of a conversion in config.json, and whether the weights still are what it
says.
"""

import json

import pytest
import torch
from conversion_models import carry_out, causal_lm, config_of

from hf_rmsnorm.conversion.proxy.discover import discover
from hf_rmsnorm.conversion.proxy.model import give_weights, make_proxy
from hf_rmsnorm.converted.follow import STAYS, conversion_of
from hf_rmsnorm.converted.record import RECORD_KEY, make_record


def converted(name, dtype=torch.float64):
    """A converted model, with the record in its config as config.json gives it back."""
    config = config_of(name)
    config.tie_word_embeddings = False
    model = causal_lm(config)
    plan = discover(make_proxy(config))
    tensors = carry_out(plan, model.state_dict())
    model.load_state_dict(tensors)
    written = json.dumps(plan.config)
    model.config.hf_rmsnorm = json.loads(written)[RECORD_KEY]
    return model.to(dtype)


def why_not(model):
    """What the weights of a model say against its record."""
    return conversion_of(model).why_not.removeprefix(STAYS)


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gpt2", "persimmon"])
def test_converted_weights_are_centred_in_every_dtype_and_the_original_ones_are_not(
    name, dtype
):
    model = converted(name, dtype)
    assert why_not(model) == ""
    give_weights(model)
    assert "no longer has zero mean" in why_not(model)


@pytest.mark.parametrize("value", [0.01, float("nan"), float("inf")])
def test_one_element_of_one_row_is_noticed(value):
    model = converted("gpt2", torch.bfloat16)
    with torch.no_grad():
        weight = model.transformer.wte.weight
        weight[17, 3] += value * 100
    assert why_not(model).startswith("transformer.wte.weight ")


def test_only_the_recorded_blocks_are_asked():
    """v of a fused projection may have any mean."""
    model = converted("persimmon")
    name = "model.layers.1.self_attn.query_key_value.weight"
    weight = model.get_parameter(name)
    with torch.no_grad():
        weight[16:24] += 1  # v of the first head
        assert why_not(model) == ""
        weight[8:16] += 1  # k of the first head
    assert why_not(model).startswith(name)


def test_missing_and_misshapen_tensors_are_not_centred():
    model = converted("gpt2")
    table = model.transformer.wte
    table.weight = torch.nn.Parameter(table.weight[:, :31])
    assert why_not(model).startswith("transformer.wte.weight ")
    del model.transformer.wpe.weight
    text = why_not(model)
    assert text.startswith("transformer.wpe.weight: not all of it is here")


def test_a_writer_that_is_missing_from_one_layer_is_noticed():
    """A replaced layer has its tensors under other names; the layers beside it have
    not.
    """
    model = converted("gpt2")
    pattern = "transformer.h.*.mlp.c_proj.weight"
    assert model.config.hf_rmsnorm["residual_weights"][pattern]["count"] == 2
    layer = model.transformer.h[1].mlp
    layer.c_proj = torch.nn.Sequential(layer.c_proj)
    assert why_not(model).startswith(f"{pattern}: not all of it is here")


def test_a_record_of_another_version_is_not_followed():
    model = converted("gpt2")
    model.config.hf_rmsnorm["version"] = 99
    assert "version 99" in why_not(model)


def test_layers_that_are_alike_share_an_entry_and_others_do_not():
    how = {"axis": 0, "block": 8, "blocks": None}
    other = {"axis": 1, "block": 8, "blocks": None}
    layers = [f"layers.{i}.out" for i in range(3)]
    parameters = [*layers, "only.2.table"]
    weights = dict.fromkeys(parameters, how)

    def entries():
        record = make_record(weights, {}, parameters, [])
        return record["residual_weights"]

    shared = {**how, "count": 3}
    assert entries() == {"layers.*.out": shared, "only.2.table": how}
    weights["layers.1.out"] = other
    assert entries() == weights
    del weights["layers.1.out"]
    assert entries() == weights


def test_the_record_of_a_deep_model_is_short():
    config = config_of("phimoe")
    config.num_hidden_layers = 6
    plan = discover(make_proxy(config))
    assert len(json.dumps(plan.config)) < 2000
