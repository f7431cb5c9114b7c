"""What a tensor of a result is made of."""

import pytest
import torch
from checkpoints import trained

from hf_rmsnorm.conversion import tensors
from hf_rmsnorm.conversion.plan import Centre
from hf_rmsnorm.conversion.tensors import InMemory, Stored, filled, folded_bias, plus

SOURCE = InMemory(
    {
        "w": trained(12, 20),
        "v": trained(20, seed=2),
        "b": trained(12, seed=3),
        "experts": trained(3, 12, 10, seed=1),
    }
)
W, V, B, EXPERTS = (tensor.double() for tensor in SOURCE.tensors.values())


def centred(x, axis):
    return x - x.mean(axis, keepdim=True)


FOLDED = folded_bias(Stored("w"), plus(Stored("v"), 1.0), Stored("b"))
SOME = torch.tensor([3, 1, 11])
CASES = {
    "last axis": (Stored("w").then(Centre("w", 1, 20)), centred(W, 1)),
    "first axis": (Stored("w").then(Centre("w", 0, 12)), centred(W, 0)),
    "blocks": (
        Stored("w").then(Centre("w", 1, 10, (1,))),
        torch.cat([W[:, :10], centred(W[:, 10:], 1)], 1),
    ),
    "experts": (Stored("experts").then(Centre("e", 1, 12)), centred(EXPERTS, 1)),
    "a vector": (Stored("b").then(Centre("b", 0, 12)), centred(B, 0)),
    "rows": (Stored("w", SOME).then(Centre("w", 1, 20)), centred(W[SOME], 1)),
    "a bias": (FOLDED, W @ (V + 1) + B),
    "ones": (filled(Stored("w"), 1.0, axis=1), torch.ones(20).double()),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name, monkeypatch):
    monkeypatch.setattr(tensors, "ROWS", 5)
    made, expected = CASES[name]
    assert made.shape(SOURCE) == expected.shape and made.dtype(SOURCE) == torch.float32
    torch.testing.assert_close(made.wide(SOURCE), expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(made.value(SOURCE), expected.float(), rtol=0, atol=1e-8)
