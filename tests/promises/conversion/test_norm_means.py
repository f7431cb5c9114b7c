"""examples/norm_means.py: a conversion takes the mean out of every norm's input."""

import pytest
import tiny_models
import torch
from places import EXAMPLES
from processes import python
from torch import nn

from hf_rmsnorm import convert_checkpoint


def printed(model, cwd):
    """The mean of each norm's input, by path."""
    lines = python(EXAMPLES / "norm_means.py", model, cwd=cwd).splitlines()
    return {path: float(mean) for path, mean in map(str.split, lines)}


@pytest.mark.full
def test_the_means_are_gone_after_a_conversion(tmp_path):
    convert_checkpoint("demo:gpt2", tmp_path / "rms", verify=False)
    before = printed("demo:gpt2", tmp_path)
    after = printed(tmp_path / "rms", tmp_path)
    assert len(before) == 11 and before.keys() == after.keys()
    assert max(after.values()) < 1e-6 < min(before.values())


def test_they_are_those_of_the_inputs_and_the_model_is_left_alone(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from norm_means import norm_means

    model = tiny_models.build("gpt2")
    ids = tiny_models.token_ids()
    classes = [type(module) for module in model.modules()]
    means = norm_means(model, ids)
    assert [type(module) for module in model.modules()] == classes
    assert not any(module._forward_hooks for module in model.modules())
    norms = [path for path, m in model.named_modules() if isinstance(m, nn.LayerNorm)]
    assert list(means) == norms
    with torch.no_grad():
        stream = model(ids, output_hidden_states=True).hidden_states[0].double()
    ratio = stream.mean(-1).abs() / stream.square().mean(-1).sqrt()
    assert means["transformer.h.0.ln_1"] == pytest.approx(ratio.median().item())
