"""Prints, as JSON for a target of benchmarks.aot, the fused multiply-adds of each
forward kernel that is compiled.

A product with -0 added and one with 1 or -1 are none: so gfx942 writes a conversion,
and sm_80 products, sums and differences of bfloat16.
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks import aot
from hf_rmsnorm.formula import NormSpec

LLAMA, LAYER_NORM = aot.VARIANTS["llama-bf16"], aot.VARIANTS["layernorm-bf16"]
BIASED = replace(
    LLAMA, spec=NormSpec(False, 1e-6, has_bias=True, rounding="before_weight")
)
NEGATIVE_ZERO = re.compile(r"mov\.b16\s+(%\w+), 0x8000;")
ONE = re.compile(r"mov\.b16\s+(%\w+), 0x[3B]F80;")
FUSED = re.compile(
    r"^\s*(?:fma\.|v_(?:pk_)?(?:fma|mad|mac)\w*_b?f(?:16|32)).*$", re.MULTILINE
)

if __name__ == "__main__":
    target, found = sys.argv[1], {}
    recorder = aot.compile_for(target)
    for variant in (LLAMA, BIASED, LAYER_NORM, aot.VARIANTS["qk-bf16"]):
        for dtype in (torch.bfloat16, torch.float16):
            recorder.compiled.clear()
            aot.run(replace(variant, x=dtype, weight=dtype), 128)
            for kernel, made in recorder.compiled:
                text = made.asm["ptx" if target.startswith("sm") else "amdgcn"]
                if kernel.name.endswith("forward"):
                    exact = "neg(0)", *(f", {r};" for r in NEGATIVE_ZERO.findall(text))
                    exact += tuple(f", {r}, %" for r in ONE.findall(text))
                    fused = [
                        line.strip()
                        for line in FUSED.findall(text)
                        if not any(e in line for e in exact)
                    ]
                    found.setdefault(f"{kernel.name} {dtype}", []).append(fused)
    print(json.dumps(found))
