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
    text = python(EXAMPLES / "norm_means.py", model, cwd=cwd)
    means = {}
    for line in text.splitlines():
        path, mean = line.split()
        means[path] = float(mean)
    return means


@pytest.mark.full
def test_the_means_are_gone_after_a_conversion(tmp_path):
    converted = tmp_path / "rms"
    convert_checkpoint("demo:gpt2", converted, verify=False)
    before = printed("demo:gpt2", tmp_path)
    after = printed(converted, tmp_path)
    assert len(before) == 11
    assert before.keys() == after.keys()
    assert max(after.values()) < 1e-6
    assert min(before.values()) > 1e-6


def test_they_are_those_of_the_inputs_and_the_model_is_left_alone(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from norm_means import norm_means

    model = tiny_models.build("gpt2")
    ids = tiny_models.token_ids()
    classes = [type(module) for module in model.modules()]
    means = norm_means(model, ids)
    assert [type(module) for module in model.modules()] == classes
    for module in model.modules():
        assert not module._forward_hooks
    norms = []
    for path, m in model.named_modules():
        if isinstance(m, nn.LayerNorm):
            norms.append(path)
    assert list(means) == norms
    with torch.no_grad():
        output = model(ids, output_hidden_states=True)
    stream = output.hidden_states[0].double()
    mean = stream.mean(-1).abs()
    rms = stream.square().mean(-1).sqrt()
    ratio = mean / rms
    expected = ratio.median().item()
    assert means["transformer.h.0.ln_1"] == pytest.approx(expected)
