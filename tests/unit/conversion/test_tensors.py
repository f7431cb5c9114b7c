"""What a tensor of a result is made of."""

from dataclasses import replace

import pytest
import torch
from checkpoints import trained

from hf_rmsnorm.conversion import tensors
from hf_rmsnorm.conversion.checkpoint.source import Checkpoint
from hf_rmsnorm.conversion.plan import Centre
from hf_rmsnorm.conversion.tensors import Stored, filled, folded_bias, plus

TENSORS = {
    "w": trained(12, 20),
    "v": trained(20, seed=2),
    "b": trained(12, seed=3),
    "experts": trained(3, 12, 10, seed=1),
}
SOURCE = Checkpoint(TENSORS)
WIDE = replace(SOURCE, config={"dtype": "float64"})
W = TENSORS["w"].double()
V = TENSORS["v"].double()
B = TENSORS["b"].double()
EXPERTS = TENSORS["experts"].double()
SOME = torch.tensor([3, 1, 11])


def centred(x, axis):
    return x - x.mean(axis, keepdim=True)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(tensors, "ROWS", 5)


def check(made, expected):
    bare = made.value(SOURCE.without_values())
    assert bare.shape == expected.shape
    assert bare.dtype == torch.float32
    wide = made.value(WIDE)
    value = made.value(SOURCE)
    torch.testing.assert_close(wide, expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(value, expected.float(), rtol=0, atol=1e-8)


CENTRED = [
    (Stored("w"), Centre("w", 1, 20), centred(W, 1)),
    (Stored("w"), Centre("w", 0, 12), centred(W, 0)),
    (Stored("experts"), Centre("e", 1, 12), centred(EXPERTS, 1)),
    (Stored("b"), Centre("b", 0, 12), centred(B, 0)),
    (Stored("w", SOME), Centre("w", 1, 20), centred(W[SOME], 1)),
]


@pytest.mark.parametrize("tensor, step, expected", CENTRED)
def test_a_tensor_is_centred(tensor, step, expected):
    check(replace(tensor, step=step), expected)


def test_some_blocks_are_centred():
    made = Stored("w", step=Centre("w", 1, 10, (1,)))
    blocks = [W[:, :10], centred(W[:, 10:], 1)]
    check(made, torch.cat(blocks, 1))


def test_a_weight_is_folded_into_a_bias():
    made = folded_bias(Stored("w"), Stored("v"), Stored("b"))
    check(made, W @ V + B)


def test_a_number_is_added():
    check(plus(Stored("v"), 1.0), V + 1)


def test_a_tensor_of_ones():
    made = filled(Stored("w"), 1.0, axis=1)
    check(made, torch.ones(20).double())
