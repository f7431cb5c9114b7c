"""What a tensor of a result is made of: in slices of any size it is what it is as a
whole.
"""

import pytest
import torch
from checkpoints import trained

from hf_rmsnorm.conversion import tensors
from hf_rmsnorm.conversion.tensors import (
    Centring,
    InMemory,
    Scaling,
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
    "along the last axis": (Stored("w", steps=(Centring(1),)), centred(WEIGHT, 1)),
    "along the first axis": (Stored("w", steps=(Centring(0),)), centred(WEIGHT, 0)),
    "in blocks": (
        Stored("w", steps=(Centring(1, 10, (1,)),)),
        torch.cat([WEIGHT[:, :10], centred(WEIGHT[:, 10:], 1)], 1),
    ),
    "along both axes": (
        Stored("w", steps=(Centring(0), Scaling(1, Stored("v")))),
        centred(WEIGHT, 0) * SOURCE.tensors["v"].double(),
    ),
    "experts": (
        Stored("experts", steps=(Centring(1),)),
        centred(SOURCE.tensors["experts"].double(), 1),
    ),
    "a vector": (
        Stored("b", steps=(Centring(0),)),
        centred(SOURCE.tensors["b"].double(), 0),
    ),
    "rows": (Stored("w", torch.tensor([3, 1, 11])), WEIGHT[[3, 1, 11]]),
    "rows, centred": (
        Stored("w", torch.tensor([3, 1]), (Centring(1),)),
        centred(WEIGHT[[3, 1]], 1),
    ),
    "a bias": (
        folded_bias(Stored("w"), plus(Stored("v"), 1.0), Stored("b")),
        WEIGHT @ (SOURCE.tensors["v"].double() + 1) + SOURCE.tensors["b"].double(),
    ),
    "ones": (filled(Stored("w"), 1.0, axis=1), torch.ones(20).double()),
}


@pytest.mark.parametrize("size", [1, 30, 1 << 20])
@pytest.mark.parametrize("name", CASES)
def test_values(name, size, monkeypatch):
    monkeypatch.setattr(tensors, "SLICE", size)
    made, expected = CASES[name]
    assert made.shape(SOURCE) == expected.shape and made.dtype(SOURCE) == torch.float32
    torch.testing.assert_close(made.wide(SOURCE), expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(made.value(SOURCE), expected.float(), rtol=0, atol=1e-8)
