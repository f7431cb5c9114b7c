"""The machine code of the kernels, compiled ahead of time by benchmarks/aot.py: no GPU
is needed.

Registers and programs per multiprocessor are printed, not tested: ``python -m
benchmarks aot``. What protects users is: no spills on common rows, accesses of 16
bytes, sums in one order, and memory that fits the chip.
"""

import json
from collections import defaultdict

import pytest
from probes import links_for_amd
from processes import python

pytest.importorskip("triton", reason="nothing is compiled without Triton")
pytestmark = pytest.mark.full
GATED = ("mamba-bf16", "qwen3_next-bf16", "gated_layernorm-bf16")
OPERANDS = ("X", "DY", "Y", "DX", "G", "DG", "SHIFT", "FACTOR", "RES", "H", "DH", "Q", "K", "YQ", "YK", "DYQ", "DYK",
            "DXQ", "DXK", "COS", "SIN")  # fmt: skip
SHARED_LIMIT = {"sm_75": 65_536, "sm_80": 166_912, "sm_86": 101_376, "sm_89": 101_376, "sm_90": 232_448,
                "sm_100": 232_448, "sm_120": 101_376, "gfx942": 65_536}  # fmt: skip

SAMPLE = (
    "sm_90:llama-bf16",
    "sm_90:llama-bf16-frozen,llama-fp16,llama-fp32,llama-mixed,gemma-bf16,t5-mixed,plain-bf16:128,8192,14336",
    "sm_90:layernorm-bf16,layernorm-fp32:128,4096,14336",
    "sm_90:llama-bf16-unaligned,llama-bf16-strided,layernorm-bf16-strided:128,4096",
    "sm_90:mamba-bf16,qwen3_next-bf16:128,4096,8192",
    "sm_90:textbook-fp32:4096",
    "sm_80,sm_90,sm_100:layernorm-bf16,cohere-bf16,add_layernorm-bf16:9216,12288",
    "sm_80,sm_90:llama-fp32-unaligned,add_llama-fp32-unaligned:16384",
    "sm_80:gated_layernorm-bf16:8192",
    "sm_86:add_llama-mixed:4096,8192",
    "sm_80:llama-halves-output:16384",
    "sm_80,sm_100,gfx942:llama-bf16:96,896,4096,14336",
    "sm_80,sm_86,gfx942:llama-fp32:16384",
    "sm_86,gfx942:layernorm-fp32:8192",
    "sm_90:add_llama-bf16",
    "sm_90:add_llama-bf16-frozen,add_llama-fp32,add_layernorm-bf16:128,4096,8192",
    "sm_90:add_llama-bf16-unaligned:4096",
    "sm_90:llama-bf16-output,add_llama-bf16-output:128,4096,8192,14336",
    "sm_90:layernorm-bf16-output:128,4096",
    "sm_80,sm_100,gfx942:add_llama-bf16:128,896,4096,8192,14336,16384",
    "sm_80,sm_90,sm_100,gfx942:qk-bf16:64,128,256",
    "sm_90:qk-bf16-unaligned,qk-fp32:128",
    "sm_80,sm_90,sm_100,gfx942:modulated-bf16,add_modulated-bf16:1152,3072",
    "sm_75:llama-bf16,llama-fp16,add_llama-bf16:128,4096",
    "sm_89,sm_120:llama-bf16,layernorm-bf16,add_llama-bf16,add_layernorm-bf16:128,4096,8192",
    "sm_89,sm_120:qk-bf16:64,128,256",
    "sm_75:qk-bf16:128",
)


@pytest.fixture(scope="module")
def kernels():
    cases = SAMPLE
    if not links_for_amd():
        cases = tuple(case.replace(",gfx942", "") for case in cases)
    return json.loads(python("-m", "benchmarks", "aot", *cases, "--json"))["kernels"]


def name_of(kernel):
    return "{target} {variant} {kernel} N={hidden_size}".format(**kernel)


def test_every_kernel_compiles_for_every_target(kernels):
    names = defaultdict(set)
    for kernel in kernels:
        names[kernel["target"]].add(kernel["kernel"])
    rows = {"norm_forward", "norm_backward", "reduce_partials"}
    heads = {"qk_norm_forward", "qk_norm_backward"}
    heads |= {"rotary_forward", "rotary_backward"}
    targets = ["sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"]
    if links_for_amd():
        targets.append("gfx942")
    for target in targets:
        assert names[target] == rows | heads, target


def is_common(kernel):
    """Aligned rows of up to 8,192 columns without a gate, where no chip has less."""
    variant = kernel["variant"]
    aligned = not variant.endswith(("unaligned", "strided"))
    return (
        kernel["target"] in ("sm_80", "sm_89", "sm_90", "sm_120")
        and aligned
        and variant not in GATED
        and kernel["hidden_size"] <= 8_192
    )


def test_common_rows_spill_no_register(kernels):
    common = [kernel for kernel in kernels if is_common(kernel)]
    spilled = [name_of(kernel) for kernel in common if kernel["spilled"]]
    assert common and not spilled


def widths_of(kernel):
    """The bytes of each access to rows, by operand."""
    widths = kernel["widths"]
    of_rows = {operand: widths[operand] for operand in OPERANDS if operand in widths}
    assert of_rows or kernel["kernel"] == "reduce_partials"
    return of_rows


def test_rows_move_by_16_bytes(kernels):
    """Loads and stores of x, dy, y, dx and gates where pointers and strides are
    aligned; 8 bytes are enough on AMD.
    """
    for kernel in kernels:
        least = 8 if kernel["target"].startswith("gfx") else 16
        if not kernel["variant"].endswith("unaligned"):
            for operand, widths in widths_of(kernel).items():
                assert min(widths) >= least, f"{name_of(kernel)} {operand}"


def test_nothing_is_assumed_of_unaligned_rows(kernels):
    for kernel in kernels:
        size = 4 if "fp32" in kernel["variant"] else 2
        if kernel["variant"].endswith("unaligned"):
            for widths in widths_of(kernel).values():
                assert widths == [size], name_of(kernel)


def test_a_residual_leaves_the_order_of_the_norms_additions(kernels):
    """So that residual + x and then the norm, and both in one launch, are the same bits
    on a GPU too.
    """
    sums = {}
    for k in kernels:
        place = k["target"], k["kernel"], k["hidden_size"]
        sums.setdefault(place, {})[k["variant"]] = k["sums"]
    compared = 0
    for (target, kernel, hidden_size), found in sums.items():
        if not kernel.startswith("norm_forward"):
            continue
        for variant in [v for v in found if f"add_{v}" in found]:
            where = f"{target} {variant} N={hidden_size}"
            assert found[f"add_{variant}"] == found[variant] != [], where
            compared += 1
    assert compared >= 20


def test_shared_memory_fits_the_chip(kernels):
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_LIMIT[kernel["target"]], name_of(kernel)
