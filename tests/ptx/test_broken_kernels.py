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
from computed import compute_norm, run_kind
from heads import fused_qk_norm
from torch.utils._pytree import tree_map_only

from benchmarks.ptx import Fault, Kernel
from hf_rmsnorm import NormSpec, use_backend
from hf_rmsnorm.ops import first_use, self_check
from hf_rmsnorm.ops.launches import forget_launches

BF16 = torch.bfloat16
GUARD = r"(?<=\n\t)@!?%p\d+ "
MASKED = r"(?:@!?%p\d+ )?"
SHUFFLE = r"shfl\.sync\.bfly\.b32\s+(%r\d+), (%r\d+), \d+, 31, -1;"
FURTHER = r"(st\.global[^\[]*\[ ?%rd\d+ ?)(?:\+ 0 )?\]"
ALONE = {
    # But for one behind which a program ends, or branches off, without another look at
    # shared memory.
    "a wait removed": (
        r"cp\.async\.wait_group\s+\d+;(?!(?:(?!shared)(?:.|\n))*?\b(?:ret;|bra\b))",
        "",
    ),
    "a mask of a global store removed": (GUARD + r"(?=st\.global)", ""),
    "a mask turned around": (r"(?<=\n\t)@%p(?=\d+ (?:ld|st|cp)\.)", "@!%p"),
    "a shuffle removed": (SHUFFLE, r"mov.b32 \1, \2;"),
    "a global store removed": (MASKED + r"st\.global[^;]*;", ""),
    "a global store two bytes on": (FURTHER, r"\1+ 2 ]"),
    "a shared store removed": (MASKED + r"st\.shared[^;]*;", ""),
    "a shared load elsewhere": (r"(ld\.shared[^\[]*\[%r\d+)\]", r"\1+16]"),
    "a result never computed": (
        r"(?:fma\.rn|mul(?:\.rn)?|add(?:\.rn)?|sub(?:\.rn)?)\.f32[^;]*;",
        "",
    ),
}
TOGETHER = {
    "barriers removed": (r"bar\.sync\s+0;", ""),
    "masks of global loads removed": (GUARD + r"(?=ld\.global)", ""),
    "bounds one on": (r"(setp\.)lt(\.[su]32)", r"\1le\2"),
}
KINDS = (*ALONE, *TOGETHER)
KERNELS = ("norm_forward", "norm_backward", "reduce_partials", "qk_norm_forward")
MOST = 8  # statements of a kind that are broken one by one


def run_rows():
    x = torch.randn(600, 96, dtype=BF16, requires_grad=True)
    dy = torch.randn(600, 96, dtype=BF16)
    w = torch.randn(96, dtype=BF16, requires_grad=True)
    b = torch.randn(96, dtype=BF16, requires_grad=True)
    y = compute_norm(x, w, b, NormSpec(True, 1e-6, has_bias=True))
    return y.detach(), *torch.autograd.grad(y, (x, w, b), dy)


def run_heads():
    q = torch.randn(1, 4, 40, 96, dtype=BF16)
    k = torch.randn(1, 2, 40, 96, dtype=BF16)
    weights = torch.randn(2, 96, dtype=BF16)
    tables = torch.randn(2, 1, 40, 96, dtype=BF16)
    spec = NormSpec(False, 1e-6, rounding="before_weight")
    return fused_qk_norm(q, k, *weights, spec, *tables)


@cache
def launch_of(driver, name):
    """(kernel, grid, shared memory, arguments, numbers of those that it wrote) of a
    launch that walks every loop.
    """
    torch.manual_seed(0)
    driver.launches = []
    with use_backend("triton"):
        run_heads()
        run_rows()
    launches = {launch[0].name: launch for launch in driver.launches}
    kernel, grid, shared, arguments = launches[name]
    if name == "reduce_partials":  # of as many programs as a large chip runs
        arguments[0] = torch.randn(2, 792, 96)
        arguments[3] = arguments[4] = 792
    written = driver.machine.launch(kernel, grid, shared, arguments)
    return kernel, grid, shared, arguments, written


def noticed(driver, launch, text):
    kernel, grid, shared, arguments, written = launch
    copies = tree_map_only(torch.Tensor, torch.clone, list(arguments))
    for number in written:
        copies[number].fill_(torch.nan)
    try:
        driver.machine.launch(Kernel(text), grid, shared, copies)
    except Fault:
        return True
    same = [torch.equal(copies[n], arguments[n]) for n in written]
    return not all(same)


def broken(text, kind):
    """The text with a statement of a kind broken, or with all, where one by itself may
    do no harm.
    """
    if kind in TOGETHER:
        new = re.sub(*TOGETHER[kind], text)
        return [new] if new != text else []
    pattern, replacement = ALONE[kind]
    sites = list(re.finditer(pattern, text))
    step = max(1, -(-len(sites) // MOST))
    texts = []
    for site in sites[::step]:
        new = site.expand(replacement)
        texts.append(text[: site.start()] + new + text[site.end() :])
    return texts


@pytest.mark.full
def test_what_is_broken_is_noticed(driver):
    unnoticed = []
    for name in KERNELS:
        launch = launch_of(driver, name)
        kernel, *_ = launch
        assert not noticed(driver, launch, kernel.text)
        for kind in KINDS:
            for text in broken(kernel.text, kind):
                if not noticed(driver, launch, text):
                    unnoticed.append(f"{name}: {kind}")
    assert not unnoticed


@pytest.mark.full
def test_each_kind_breaks_some_kernel(driver):
    for kind in KINDS:
        texts = []
        for name in KERNELS:
            kernel, *_ = launch_of(driver, name)
            texts += broken(kernel.text, kind)
        assert texts, kind


@pytest.mark.full
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", self_check.KINDS)
def test_sound_kernels_are_kept_at_their_first_use(kind, dtype, driver):
    with use_backend("triton"):
        run_kind(kind, dtype)
    assert first_use.equal_kernels[torch.device("cpu")] == 2, "forward and backward"


def results_of(driver, name, text, monkeypatch):
    """The results of a first use where the kernel of a name has another text; None where
    it is refused. What it is to write holds no results of a launch before it.
    """
    launch = driver.machine.launch
    *_, written = launch_of(driver, name)

    def launch_broken(kernel, grid, shared, arguments):
        if kernel.name == name:
            kernel = Kernel(text)
            for number in written:
                arguments[number].fill_(torch.nan)
        return launch(kernel, grid, shared, arguments)

    torch.manual_seed(0)
    forget_launches()
    try:
        with use_backend("triton"), monkeypatch.context() as patches:
            patches.setattr(driver.machine, "launch", launch_broken)
            return *run_heads(), *run_rows()
    except Fault:
        return None
    except RuntimeError as error:
        assert "differs from the code" in str(error)
        return None


@pytest.mark.full
@pytest.mark.differs
@pytest.mark.parametrize("name", KERNELS)
def test_broken_kernels_are_refused_at_their_first_use(name, driver, monkeypatch):
    kernel, *_ = launch_of(driver, name)
    sound = results_of(driver, name, kernel.text, monkeypatch)
    refused = []
    for kind in KINDS:
        for text in broken(kernel.text, kind):
            results = results_of(driver, name, text, monkeypatch)
            if results is None:
                refused.append(kind)
                continue
            # what it does not compute is not needed for so few partial sums
            same = map(torch.equal, results, sound)
            assert name == "reduce_partials" and all(same), kind
    assert len(set(refused)) >= 7
