"""CUDA graphs of parts of a model: what is replayed on other values uses nothing that was computed outside of it.

Whether a graph is captured is all that a GPU would say here, so it is said in its place.
"""

import pytest
import torch
from fusion_models import IDS, build, layers_of

from hf_rmsnorm import count_launches, patch_model
from hf_rmsnorm.fused import handover, layer


@pytest.fixture
def graph(monkeypatch):
    """A function that says from now on whether a graph is captured."""
    state = [False]
    for module in (handover, layer):
        monkeypatch.setattr(module, "capturing", lambda tensor: state[0])
    return lambda captured: state.__setitem__(0, captured)


@pytest.fixture
def calls():
    """Of a patched LLaMA the functions of its first two layers."""
    model = build("llama")
    patch_model(model)
    x = model.get_input_embeddings()(IDS)
    tables = model.model.rotary_emb(x, torch.arange(IDS.shape[1])[None])
    first, second = ((lambda h, each=each: each(h, position_embeddings=tables)) for each in layers_of(model)[:2])
    yield x, first, second
    del model  # until here: a layer that is gone reads no sum


def launches(function, *args):
    with torch.no_grad(), count_launches() as counts:
        y = function(*args)
    return y, counts["norm_forward"]


def test_a_layer_captured_after_an_eager_one_computes_its_input_norm_itself(calls, graph):
    x, first, second = calls
    h, _ = launches(first, x)
    assert launches(second, h)[1] == 2  # its two sums; the norm of its input came with the first layer's last sum
    h, _ = launches(first, x)
    graph(True)
    assert launches(second, h)[1] == 2  # the norm of its input, and the sum in its middle


def test_an_eager_layer_takes_nothing_from_a_captured_one(calls, graph):
    x, first, second = calls
    graph(True)
    h, _ = launches(first, x)
    graph(False)
    assert launches(second, h)[1] == launches(second, h.clone())[1] == 3


def test_two_layers_captured_apart_hand_nothing_over(calls, graph):
    x, first, second = calls
    graph(True)
    h, _ = launches(first, x)
    h.add_(1.0)  # as when the second graph is replayed on another input
    assert torch.equal(launches(second, h)[0], launches(second, h.clone())[0])
    h, _ = launches(first, x)
    assert launches(second, h)[1] == launches(second, h.clone())[1]
