"""Parameters are found in the checkpoint that Transformers writes, renamed, split,
stacked or tied.
"""

import pytest
import tiny_models
import torch

from hf_rmsnorm.conversion.plan import Centre, Copy
from hf_rmsnorm.conversion.proxy.keys import (
    centred_blocks,
    keys_of,
    saved_tensors,
    untied,
)
from hf_rmsnorm.conversion.proxy.shift_invariance import centre


def test_every_parameter_is_found_under_its_own_name():
    model = tiny_models.build("qwen3")
    before = {name: p.clone() for name, p in model.named_parameters()}
    keys = keys_of(model)
    assert keys == {name: [name] for name in before}
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])


def test_experts_are_found_where_the_checkpoint_has_them_one_by_one():
    model = tiny_models.build("mixtral")
    keys = keys_of(model)
    saved = saved_tensors(model)
    (stacked,) = [
        name
        for name, _ in model.named_parameters()
        if "layers.0" in name and name.endswith("down_proj")
    ]
    found = keys[stacked]
    assert len(found) == 2
    for key in found:
        assert ".experts." in key
    sums = model.get_parameter(stacked).sum((1, 2)).tolist()
    assert sorted(saved[key].sum().item() for key in found) == pytest.approx(
        sorted(sums), abs=1e-4
    )


def test_a_tied_parameter_is_copied_from_what_is_saved():
    tied, other = (
        tiny_models.build("llama", tie_word_embeddings=tie) for tie in (True, False)
    )
    assert untied(tied, other) == [Copy("lm_head.weight", "model.embed_tokens.weight")]


def test_blocks_that_write_to_the_stream_become_operations_on_the_checkpoint():
    model = tiny_models.build("llama").double()
    down = "model.layers.1.mlp.down_proj.weight"
    table = "model.embed_tokens.weight"
    whole = {"axis": 0, "block": 64, "blocks": None}
    parts = {"axis": 1, "block": 16, "blocks": [0, 2]}
    centre(model, {down: whole, table: parts})
    steps = [Centre(table, 1, 16, (0, 2)), Centre(down, 0, 64)]
    assert centred_blocks(model, (16, 64)) == steps
