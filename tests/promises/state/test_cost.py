"""What a patch costs: recognition once per formula, bookkeeping for the rest."""

import sys

import pytest
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import patch_model


def layered(layers, cls, size=64):
    """As many layers as asked, with two norms and some modules that are none."""
    model = nn.ModuleDict({"layers": nn.ModuleList(), "norm": cls(size)})
    for _ in range(layers):
        parts = cls(size), nn.Linear(8, 8), nn.SiLU(), cls(size), nn.Dropout()
        model["layers"].append(nn.ModuleList(parts))
    return model


@pytest.mark.parametrize("base", [LlamaRMSNorm, nn.LayerNorm])
def test_an_80_layer_model_is_examined_as_often_as_a_2_layer_one(base):
    def examinations(layers):
        class Spied(base):
            def forward(self, x):
                return super().forward(x)

        model = layered(layers, Spied)
        calls = []

        def note(frame, event, argument):
            if event == "call" and frame.f_code is Spied.forward.__code__:
                calls.append(frame)

        sys.setprofile(note)
        try:
            assert len(patch_model(model, strict=True).swapped) == 2 * layers + 1
        finally:
            sys.setprofile(None)
        return len(calls)

    assert examinations(80) == examinations(2) > 0
