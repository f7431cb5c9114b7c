"""What a patch costs: recognition once per formula, bookkeeping for the rest, no memory
for weights that are not there.
"""

import sys

import pytest
from processes import python
from reports import calls_of
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
        with calls_of(Spied.forward) as calls:
            assert len(patch_model(model, strict=True).swapped) == 2 * layers + 1
        return len(calls)

    assert examinations(80) == examinations(2) > 0


LARGE = """
import resource, sys, torch
torch.set_num_threads(1)
from transformers import AutoConfig, AutoModelForCausalLM
import hf_rmsnorm, hf_rmsnorm.patching
sizes = dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
             num_key_value_heads=8, vocab_size=128256)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes), dtype=torch.bfloat16)
assert sum(p.numel() for p in model.parameters()) > 70e9
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = hf_rmsnorm.patch_model(model, strict=True)
assert len(report.swapped) == 161 and all(p.is_meta for p in model.parameters())
assert hf_rmsnorm.unpatch_model(model) == 161
unit = 2**20 if sys.platform == "darwin" else 2**10
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit)
"""


@pytest.mark.full
@pytest.mark.skipif(
    sys.platform == "win32",
    reason="Windows does not say what a process's peak memory was",
)
def test_a_70b_model_on_meta_takes_no_memory():
    mebibytes = float(python("-c", LARGE))
    assert mebibytes < 200  # 15 where this was written
