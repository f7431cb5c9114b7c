"""Prints, as JSON, the launches of a training step and how many kernels it loads, before and while a graph is captured.

In a process without Triton's interpreter, with a driver that launches nothing; the argument is not read.
"""

import json
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.host import launches_left_out
from hf_rmsnorm import count_launches, patch_model
from hf_rmsnorm.kernels.launch import KERNELS
from hf_rmsnorm.ops import from_output

found = []
with launches_left_out():
    for norm in (LlamaRMSNorm(96), torch.nn.LayerNorm(96)):
        model = torch.nn.Sequential(norm)
        patch_model(model, memory_efficient=True)
        x = torch.randn(8, 96, requires_grad=True)
        for capturing in (False, True):
            from_output.capturing = lambda tensor, answer=capturing: answer
            before = sum(len(kernel._compiled) for kernel in KERNELS)
            with count_launches() as launches:
                torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
            loaded = sum(len(kernel._compiled) for kernel in KERNELS) - before
            found.append({"capturing": capturing, "launches": sum(launches.values()), "loaded": loaded})
print(json.dumps(found))
