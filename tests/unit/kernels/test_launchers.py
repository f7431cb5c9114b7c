"""Which way kernels are started, by each Triton, and what is said of it."""

import os

import pytest
import torch

from benchmarks.ptx.driver import RUN_BY

triton = pytest.importorskip("triton", reason="there is nothing to launch")

from hf_rmsnorm.kernels import launchers  # noqa: E402

CPU = torch.device("cpu")
executes = pytest.mark.skipif(
    os.environ.get(RUN_BY) != "executor", reason="Triton's interpreter has no launches"
)


def test_the_launches_of_the_triton_that_is_installed_are_known():
    """If this fails: read CudaLauncher in its backends/nvidia/driver.py beside
    `launchers`, compare the arguments, and name the version there, and in `TRITONS` of
    benchmarks/ptx/driver.py.
    """
    assert launchers.KNOWN, launchers.VERSION


@pytest.fixture
def newer(monkeypatch):
    """A Triton that is not known."""
    monkeypatch.setattr(launchers, "KNOWN", False)
    monkeypatch.setattr(launchers, "_tried", {})


@executes
def test_a_newer_triton_that_starts_kernels_as_before_is_direct(newer):
    assert launchers.slow_because(CPU) == ""
    assert launchers._tried == {CPU: ""}


def raising(grid):
    def call(*args):
        raise TypeError("takes 3 positional arguments\nbut more were given")

    return call


def moved_by_one(compiled):
    """A launch whose arguments are not where the kernel reads them."""

    def at(grid):
        start = compiled(grid)
        return lambda out, absent, *rest: start(out, absent, *rest[1:], rest[0])

    return at


def of_fewer_programs(compiled):
    return lambda grid: compiled((1, 1, 1))


@executes
@pytest.mark.parametrize(
    ("way", "said"),
    [
        (lambda compiled: raising, "raises TypeError: takes 3 positional arguments"),
        (moved_by_one, "computes something else"),
        (of_fewer_programs, "elements of argument 0 are not written"),
    ],
)
def test_a_newer_triton_that_starts_kernels_otherwise_is_named(
    way, said, newer, monkeypatch
):
    compiled_kernel = triton.compiler.CompiledKernel
    start = compiled_kernel.__getitem__
    monkeypatch.setattr(
        compiled_kernel,
        "__getitem__",
        lambda compiled, grid: way(lambda g: start(compiled, g))(grid),
    )
    reason = launchers.slow_because(CPU)
    assert reason.startswith("a direct launch ")
    assert said in reason
    assert "\n" not in reason


@executes
def test_what_keeps_every_kernel_from_running_is_no_answer(newer, monkeypatch):
    def broken(self, *args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(triton.runtime.JITFunction, "run", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            launchers.slow_because(CPU)
    assert launchers.slow_because(CPU) == ""
