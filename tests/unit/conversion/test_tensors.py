"""What a tensor of a result is made of."""

import pytest
import torch
from checkpoints import trained

from hf_rmsnorm.conversion import tensors
from hf_rmsnorm.conversion.tensors import (
    Centring,
    InMemory,
    Stored,
    filled,
    folded_bias,
    plus,
)

SOURCE = InMemory(
    {
        "w": trained(12, 20),
        "experts": trained(3, 12, 10, seed=1),
        "v": trained(20, seed=2),
    }
)
SOURCE.tensors["b"] = trained(12, seed=3)
WEIGHT = SOURCE.tensors["w"].double()


def centred(x, axis):
    return x - x.mean(axis, keepdim=True)


CASES = {
    "along the last axis": (Stored("w").then(Centring(1)), centred(WEIGHT, 1)),
    "along the first axis": (Stored("w").then(Centring(0)), centred(WEIGHT, 0)),
    "in blocks": (
        Stored("w").then(Centring(1, 10, (1,))),
        torch.cat([WEIGHT[:, :10], centred(WEIGHT[:, 10:], 1)], 1),
    ),
    "experts": (
        Stored("experts").then(Centring(1)),
        centred(SOURCE.tensors["experts"].double(), 1),
    ),
    "a vector": (
        Stored("b").then(Centring(0)),
        centred(SOURCE.tensors["b"].double(), 0),
    ),
    "rows": (Stored("w", torch.tensor([3, 1, 11])), WEIGHT[[3, 1, 11]]),
    "rows, centred": (
        Stored("w", torch.tensor([3, 1])).then(Centring(1)),
        centred(WEIGHT[[3, 1]], 1),
    ),
    "a bias": (
        folded_bias(Stored("w"), plus(Stored("v"), 1.0), Stored("b")),
        WEIGHT @ (SOURCE.tensors["v"].double() + 1) + SOURCE.tensors["b"].double(),
    ),
    "ones": (filled(Stored("w"), 1.0, axis=1), torch.ones(20).double()),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name, monkeypatch):
    monkeypatch.setattr(tensors, "ROWS", 5)
    made, expected = CASES[name]
    assert made.shape(SOURCE) == expected.shape and made.dtype(SOURCE) == torch.float32
    torch.testing.assert_close(made.wide(SOURCE), expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(made.value(SOURCE), expected.float(), rtol=0, atol=1e-8)
