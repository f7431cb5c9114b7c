"""Calls like an earlier one: what that looked up launches them with the same bits, and no others."""

import itertools
from unittest.mock import MagicMock, call

import pytest
import torch
import triton

from hf_rmsnorm import count_launches
from hf_rmsnorm.formula import NormSpec
from hf_rmsnorm.ops.backend import device_refusal

if device_refusal("cpu") is not None:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from hf_rmsnorm.kernels import compiled, launch
from hf_rmsnorm.kernels.plan import forget, forward_plan
from hf_rmsnorm.ops.gradients import norm_gradients

compiles = pytest.mark.skipif(compiled.INTERPRETED, reason="the interpreter keeps no launch")

RMS = NormSpec(False, 1e-2, rounding="before_weight")
SPECS = {
    "rms": RMS,
    "biased": NormSpec(False, 1e-2, has_bias=True),
    "weightless": NormSpec(False, 1e-2, has_weight=False),
    "layer norm": NormSpec(True, 1e-2, has_bias=True, functional=True),
}
HALF = torch.bfloat16


def rows(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(spec, size=24, dtype=torch.float32):
    weight = rows(size, seed=2, dtype=dtype) if spec.has_weight else None
    return rows(2, 3, size, dtype=dtype), weight, rows(size, seed=3, dtype=dtype) if spec.has_bias else None


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype)


@compiles
@pytest.mark.parametrize("size", [24, 25, 16_376])
@pytest.mark.parametrize("has_residual, stats", itertools.product([False, True], repeat=2))
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_next_forward_has_the_bits_of_the_first(spec, has_residual, stats, size):
    x, weight, bias = operands(spec, size)
    residual = rows(2, 3, size, seed=1) if has_residual else None
    forget()
    plan = forward_plan(x, weight, bias, None, spec, residual)
    first = launch.norm_forward(x, weight, bias, spec, stats, None, residual, plan)
    assert plan.launch.ready
    found = launch.norm_forward(x, weight, bias, spec, stats, None, residual, plan)
    assert_same(found, first)
    assert all(a is None or a.data_ptr() != b.data_ptr() for a, b in zip(found, first, strict=True))


@compiles
@pytest.mark.parametrize("need", [n for n in itertools.product([False, True], repeat=3) if any(n)])
@pytest.mark.parametrize("size", [24, 16_376])
@pytest.mark.parametrize("has_dh", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_next_backward_has_the_bits_of_the_first(spec, has_dh, need, size, monkeypatch):
    x, weight, bias = operands(spec, size)
    need = (need[0], need[1] and spec.has_weight, need[2] and spec.has_bias, False)
    if not any(need):
        return
    dy, dh = rows(2, 3, size, seed=4), rows(2, 3, size, seed=5) if has_dh and need[0] else None
    forget()
    plan = forward_plan(x, weight, bias, None, spec)
    _, rstd, mean, _ = launch.norm_forward(x, weight, bias, spec, True, None, None, plan)
    kept = spec, False, plan, x.stride(), need, dh
    with torch.no_grad():
        first = norm_gradients(dy, x, weight, bias, None, rstd, mean, *kept)
        assert plan.last[0][0] == (need, False, dh is None)
        monkeypatch.setattr(launch, "norm_backward", None)  # what is not called
        assert_same(norm_gradients(dy, x, weight, bias, None, rstd, mean, *kept), first)


@compiles
def test_a_backward_of_other_operands_is_planned_anew():
    x, weight, _ = operands(RMS)
    plan = forward_plan(x, weight, None, None, RMS)
    _, rstd, _, _ = launch.norm_forward(x, weight, None, RMS, True, None, None, plan)
    need = True, True, False, False
    dy = rows(2, 3, 24, seed=4)
    others = (
        dy, dy[:, :1].expand(2, 3, 24), dy.to(HALF), dy.transpose(0, 1).contiguous().transpose(0, 1),
        rows(145, seed=4)[1:].view(2, 3, 24),
    )  # fmt: skip
    with torch.no_grad():
        for one, other in itertools.permutations(others, 2):
            expected = launch.norm_backward(other, x, weight, None, rstd, None, RMS, need)
            norm_gradients(one, x, weight, None, None, rstd, None, RMS, False, plan, x.stride(), need)
            found = norm_gradients(other, x, weight, None, None, rstd, None, RMS, False, plan, x.stride(), need)
            assert_same(found, expected)


@compiles
def test_pointers_that_are_not_aligned_are_served_by_the_other_code():
    storage = rows(2 * 3 * 32 + 1, seed=7)
    aligned, other = storage[:-1].view(2, 3, 32), storage[1:].view(2, 3, 32)
    weight, bias = rows(33, seed=2), rows(33, seed=3)
    spec = SPECS["biased"]
    plan = forward_plan(aligned, weight[:-1], bias[:-1], None, spec, aligned)
    launch.norm_forward(aligned, weight[:-1], bias[:-1], spec, False, None, aligned, plan)
    for place in range(4):
        given = [aligned, weight[:-1], bias[:-1], aligned]
        given[place] = [other, weight[1:], bias[1:], other][place]
        found = launch.norm_forward(*given[:3], spec, False, None, given[3], plan)
        expected = launch.norm_forward(*(t.clone() for t in given[:3]), spec, False, None, given[3].clone())
        torch.testing.assert_close((found[0], found[3]), (expected[0], expected[3]))  # its sums have another order


@compiles
def test_launches_are_counted():
    x, weight, _ = operands(RMS)
    plan = forward_plan(x, weight, None, None, RMS)
    for _ in range(2):
        with count_launches() as launches:
            launch.norm_forward(x, weight, None, RMS, False, None, None, plan)
        assert launches == {"norm_forward": 1}


@compiles
def test_another_current_device_has_its_own_launch(monkeypatch):
    x, weight, _ = operands(RMS, 40)
    now = [0]
    monkeypatch.setattr(compiled, "current_device", lambda _: lambda: now[0])
    forget()
    plan = forward_plan(x, weight, None, None, RMS)
    first = launch.norm_forward(x, weight, None, RMS, False, None, None, plan)
    (before,) = plan.launch.ready.values()
    now[0] = 1
    assert before(()) is False
    assert_same(launch.norm_forward(x, weight, None, RMS, False, None, None, plan), first)
    assert [*plan.launch.ready.values()] != [before]
    assert_same(launch.norm_forward(x, weight, None, RMS, False, None, None, plan), first)


def test_hooks_of_launches_are_told(monkeypatch):
    kernel, run, stream_of = MagicMock(), MagicMock(), lambda index: f"stream of {index}"
    ready = compiled._ready((1, 2, 3), lambda: 0, kernel, run, stream_of, "function", "metadata", 5)
    assert ready(("x",)) and not kernel.mock_calls
    run.assert_called_once_with(1, 2, 3, "stream of 5", "function", "metadata", None, None, None, "x")
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(compiled._hooks, name, lambda about: None)
            assert ready(("y",))
    assert kernel.mock_calls == [call.__getitem__((1, 2, 3)), call.__getitem__()("y")] * 2 and run.call_count == 1


@pytest.mark.skipif(not compiled.KNOWN_LAUNCHERS, reason="another Triton's launcher is called as it is")
def test_the_launcher_of_triton_is_given_what_it_gives_itself(monkeypatch):
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(triton.runtime.driver, "_active", MagicMock())  # where there is none, asking for it raises
    given = []
    launcher = object.__new__(driver.CudaLauncher)
    names = ("launch_cooperative_grid", "launch_pdl", "arg_annotations", "kernel_signature")
    vars(launcher).update(
        dict(zip(names, names, strict=True)), launch=lambda *args: given.append(args), num_ctas=1, gsan_enabled=False,
        global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
    )  # fmt: skip
    launcher(1, 2, 3, "stream", "function", "metadata", None, None, None, "x", 7)
    start, between = compiled._launcher(launcher, "metadata")
    start(1, 2, 3, "stream", "function", *between, ("x", 7))
    assert given[0] == given[1] and len(given) == 2
    called = []
    other = object.__new__(type("CudaLauncher", (), {"__call__": lambda self, *args: called.append(args)}))
    vars(other).update(vars(launcher), global_scratch_size=64)  # one that asks for memory is called as it is
    for run in (other, lambda *args: called.append(args)):
        start, between = compiled._launcher(run, "metadata")
        start(1, 2, 3, "stream", "function", *between, ("x", 7))
    assert called == [(1, 2, 3, "stream", "function", "metadata", None, None, None, "x", 7)] * 2 and len(given) == 2
