"""Prints, as JSON for a target of benchmarks.aot, the fused multiply-adds of each
forward kernel that is compiled.

A product with -0 added and one with 1 or -1 are none: so gfx942 writes a conversion,
and sm_80 products, sums and differences of bfloat16.
"""

import json
import re
import sys
from dataclasses import replace

import torch

from benchmarks import aot
from hf_rmsnorm.formula import NormSpec

LLAMA = aot.VARIANTS["llama-bf16"]
LAYER_NORM = aot.VARIANTS["layernorm-bf16"]
BIASED = replace(
    LLAMA, spec=NormSpec(False, 1e-6, has_bias=True, rounding="before_weight")
)
# of one bfloat16, or of two in one register
NEGATIVE_ZERO = re.compile(r"mov\.b(?:16|32)\s+(%\w+), (?:0x8000|-2147450880);")
ONE = re.compile(r"mov\.b(?:16|32)\s+(%\w+), (?:0x[3B]F80|1065369472|-1082081408);")
FUSED = re.compile(
    r"^\s*(?:fma\.|v_(?:pk_)?(?:fma|mad|mac)\w*_b?f(?:16|32)).*$", re.MULTILINE
)


def fused_lines(text):
    """The fused multiply-adds of assembly that are none of a factor or a summand."""
    exact = ["neg(0)"]
    exact += [f", {register};" for register in NEGATIVE_ZERO.findall(text)]
    exact += [f", {register}, %" for register in ONE.findall(text)]
    lines = [line.strip() for line in FUSED.findall(text)]
    return [line for line in lines if not any(words in line for words in exact)]


if __name__ == "__main__":
    target = sys.argv[1]
    found = {}
    recorder = aot.compile_for(target)
    for variant in (LLAMA, BIASED, LAYER_NORM, aot.VARIANTS["qk-bf16"]):
        for dtype in (torch.bfloat16, torch.float16):
            recorder.compiled.clear()
            aot.run(replace(variant, x=dtype, weight=dtype), 128)
            for kernel, made in recorder.compiled:
                if kernel.name.endswith("forward"):
                    text = made.asm["ptx" if target.startswith("sm") else "amdgcn"]
                    name = f"{kernel.name} {dtype}"
                    found.setdefault(name, []).append(fused_lines(text))
    print(json.dumps(found))
