"""Compiled kernels that are broken on purpose, a statement at a time: whatever was
broken must be noticed.

Noticed is what the executor reports, or other bits in an output. Where a kernel holds
statements that do no harm when they are gone (a barrier too many, a mask that is always
true, a copy of what nobody uses), all of a kind are broken at once.
"""

import re
from functools import cache

import pytest
import torch
from heads import fused_qk_norm
from ptx import Fault, Kernel

from hf_rmsnorm import NormSpec, use_backend
from hf_rmsnorm.ops import fused_add_norm, fused_norm
from hf_rmsnorm.ops.modulated import modulated_norm

BF16 = torch.bfloat16
LLAMA = NormSpec(False, 1e-6, rounding="before_weight")
LAYER_NORM = NormSpec(True, 1e-6)
LAYER_NORM_ALONE = NormSpec(True, 1e-6, has_weight=False, functional=True)
GUARD = r"(?<=\n\t)@!?%p\d+ "
MEMORY = r"(?:@!?%p\d+ )?"
SHUFFLE = r"shfl\.sync\.bfly\.b32\s+(%r\d+), (%r\d+), (\d+), 31, -1;"
ALONE = {
    # But for one behind which a program ends, or branches off, without another look at
    # shared memory.
    "a wait removed": (
        r"cp\.async\.wait_group\s+\d+;(?!(?:(?!shared)(?:.|\n))*?\b(?:ret;|bra\b))",
        "",
    ),
    "a mask of a global store removed": (GUARD + r"(?=st\.global)", ""),
    "a mask of a shared store removed": (GUARD + r"(?=st\.shared)", ""),
    "a mask of a shared load removed": (GUARD + r"(?=ld\.shared)", ""),
    "a mask of a copy removed": (GUARD + r"(?=cp\.async)", ""),
    "a mask turned around": (r"(?<=\n\t)@%p(?=\d+ (?:ld|st|cp)\.)", "@!%p"),
    "a shuffle removed": (SHUFFLE, r"mov.b32 \1, \2;"),
    "a shuffle half as far": (
        SHUFFLE,
        lambda m: m[0].replace(f", {m[3]}, 31", f", {int(m[3]) // 2 or 2}, 31"),
    ),
    "a global store removed": (MEMORY + r"st\.global[^;]*;", ""),
    "a global store two bytes on": (
        r"(st\.global[^\[]*\[ ?%rd\d+ ?)(?:\+ 0 )?\]",
        r"\1+ 2 ]",
    ),
    "a global store a vector on": (
        r"(st\.global[^\[]*\[ ?%rd\d+ ?)(?:\+ 0 )?\]",
        r"\1+ 16 ]",
    ),
    "a shared store removed": (MEMORY + r"st\.shared[^;]*;", ""),
    "a shared store elsewhere": (
        r"(st\.shared[^\[]*\[\s?%r\d+)\s?(?:\+ 0 )?\]",
        r"\1+16]",
    ),
    "a shared load elsewhere": (r"(ld\.shared[^\[]*\[%r\d+)\]", r"\1+16]"),
    "a copy to elsewhere": (
        r"(cp\.async\.c[ag]\.shared\.global \[ %r\d+ )\+ 0 \]",
        r"\1+ 16 ]",
    ),
    "a result never computed": (
        r"(?:fma\.rn|mul(?:\.rn)?|add(?:\.rn)?|sub(?:\.rn)?)\.f32[^;]*;",
        "",
    ),
}
TOGETHER = {
    "barriers removed": (r"bar\.sync\s+0;", ""),
    "one barrier in two removed": (
        r"(bar\.sync\s+0;)((?:.|\n)*?)bar\.sync\s+0;",
        r"\1\2",
    ),
    "waits one short": (
        r"(cp\.async\.wait_group\s+)(\d+);",
        lambda m: f"{m[1]}{int(m[2]) + 1};",
    ),
    "commits removed": (r"cp\.async\.commit_group;", ""),
    "masks of global loads removed": (GUARD + r"(?=ld\.global)", ""),
    "sizes of copies not masked": (
        r"(cp\.async\.c[ag]\.shared\.global [^;]*, 0x\w+), %r\d+;",
        r"\1;",
    ),
    "global loads two bytes on": (
        r"(ld\.global[^\[]*\[ ?%rd\d+ ?)(?:\+ 0 )?\]",
        r"\1+ 2 ]",
    ),
    "global loads a vector on": (
        r"(ld\.global[^\[]*\[ ?%rd\d+ ?)(?:\+ 0 )?\]",
        r"\1+ 16 ]",
    ),
    "copies from elsewhere": (
        r"(cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[ %rd\d+ )\+ 0 \]",
        r"\1+ 16 ]",
    ),
    "bounds one on": (r"(setp\.)lt(\.[su]32)", r"\1le\2"),
    "branches never taken": (r"@!?%p\d+ bra\s+[^;]*;", ""),
}
QUICK = ("norm_forward", "norm_backward", "reduce_partials")
HEADS = ("qk_norm_forward", "qk_norm_backward")
SUMS = ("norm_forward of a sum", "norm_backward of a sum")
GATES = ("norm_forward of a gated sum",)
MOST = 8  # statements of a kind that are broken one by one


def _norm(spec, rows, hidden_size):
    x, dy = (torch.randn(rows, hidden_size).to(BF16) for _ in range(2))
    w = torch.randn(hidden_size).to(BF16).requires_grad_()
    torch.autograd.grad(fused_norm(x.requires_grad_(), w, None, spec), (x, w), dy)


def _sum(rows, hidden_size):
    x, residual, dy, dh = (torch.randn(rows, hidden_size).to(BF16) for _ in range(4))
    w = torch.randn(hidden_size).to(BF16).requires_grad_()
    made = fused_add_norm(x.requires_grad_(), residual.requires_grad_(), w, None, LLAMA)
    torch.autograd.grad(made, (x, w), (dh, dy))


def _heads(length, head_dim):
    q, k = (
        torch.randn(1, heads, length, head_dim).to(BF16).requires_grad_()
        for heads in (4, 2)
    )
    weights = [torch.randn(head_dim).to(BF16).requires_grad_() for _ in range(2)]
    tables = [torch.randn(1, length, head_dim).to(BF16) for _ in range(2)]
    turned = fused_qk_norm(q, k, *weights, LLAMA, *tables)
    torch.autograd.grad(turned, (q, k, *weights), [torch.randn_like(t) for t in turned])


@cache
def launch_of(driver, name):
    """(kernel, grid, shared memory, arguments, numbers of those that it wrote) of a
    launch that walks every loop.
    """
    torch.manual_seed(0)
    driver.launches = []
    with use_backend("triton"):
        if name.startswith("qk"):
            _heads(40, 96)
        elif name in SUMS:
            _sum(600, 96)
        elif name in GATES:
            x, residual, *modulation = torch.randn(5, 600, 96).to(BF16)
            operands = x, None, None, *modulation, residual
            modulated_norm(LAYER_NORM_ALONE, operands)
        else:
            _norm(LAYER_NORM, 600, 96)
    kernel, grid, shared, arguments = next(
        made for made in driver.launches if made[0].name == name.split()[0]
    )
    if name == "reduce_partials":  # of as many programs as a large chip runs
        arguments[0], arguments[2] = torch.randn(792, 96), 792
    return (
        kernel,
        grid,
        shared,
        arguments,
        driver.machine.launch(kernel, grid, shared, arguments),
    )


def noticed(driver, launch, text):
    kernel, grid, shared, arguments, written = launch
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    for number in written:
        copies[number].fill_(torch.nan)
    try:
        driver.machine.launch(Kernel(text), grid, shared, copies)
    except Fault:
        return True
    return not all(torch.equal(copies[n], arguments[n]) for n in written)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*ALONE, *TOGETHER])
@pytest.mark.parametrize(
    "names",
    [QUICK, *(pytest.param(names, marks=pytest.mark.full) for names in (HEADS, SUMS, GATES))],
    ids=["rows", "heads", "sums", "gates"],
)  # fmt: skip
def test_what_is_broken_is_noticed(driver, names, kind):
    pattern, replacement = ALONE.get(kind) or TOGETHER[kind]
    missed, found = [], 0
    for name in names:
        launch = launch_of(driver, name)
        text = launch[0].text
        sites = list(re.finditer(pattern, text))
        found += len(sites)
        broken = {}
        if kind in ALONE:
            for site in sites[:: -(-len(sites) // MOST) or 1]:
                new = (
                    replacement(site)
                    if callable(replacement)
                    else site.expand(replacement)
                )
                broken[site.start()] = text[: site.start()] + new + text[site.end() :]
        elif sites:
            broken[0] = re.sub(pattern, replacement, text)
        missed += [
            f"{name}: {text[at : at + 60]}"
            for at, new in broken.items()
            if not noticed(driver, launch, new)
        ]
    assert not missed
    assert found or names != QUICK or "shared" in kind, "no kernel has any of these"


@pytest.mark.nightly
@pytest.mark.parametrize("name", QUICK)
def test_what_is_whole_is_not(driver, name):
    launch = launch_of(driver, name)
    assert not noticed(driver, launch, launch[0].text)
