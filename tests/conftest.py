"""What every test shares: no network, one thread, kernels that run on the CPU, and the
tiers.

``pytest`` runs the quick tier: one case of each test that is not marked ``full``.
``--all`` runs every case of every test, as CI does. A file or a test that is named runs
whole, and ``-m`` chooses by itself. A GPU is there for ``-m gpu`` and tests/gpu alone:
all others launch kernels on CPU tensors. Where only tests/ptx and tests/unit/kernels are
asked for, what is compiled of the kernels is executed there; else, and with
TRITON_INTERPRET=1, Triton's interpreter runs them.
"""

import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from benchmarks.ptx.driver import run_kernels_on_cpu

torch.set_num_threads(1)  # tiny operators: a second thread only spins

GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

# no test fails for the time that it took
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
for name, examples in (("quick", 10), ("all", 100)):
    settings.register_profile(name, max_examples=examples, derandomize=True, **UNTIMED)


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", help="every case of every test: what CI runs"
    )


def pytest_configure(config):
    of_gpu = any("tests/gpu" in argument for argument in config.args)
    if not of_gpu and not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        run_on_the_cpu(config.args)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings.load_profile("all" if config.getoption("--all") else "quick")


def run_on_the_cpu(arguments):
    if "TRITON_INTERPRET" not in os.environ:
        for name in GPUS:
            os.environ[name] = ""
    if all(
        re.search(r"tests/(ptx|unit/kernels)\b", argument) for argument in arguments
    ):
        run_kernels_on_cpu()
    # read when triton is imported, which transformers does
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_report_header(config):
    if config.option.markexpr:
        return f"tier: -m {config.option.markexpr!r}"
    if config.getoption("--all"):
        return "tier: all"
    return "tier: quick (one case of each test that is not marked full; --all runs all)"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if config.option.markexpr:
        return
    # Files with full tests first, so that no worker is left with one of them at the
    # end.
    long = {item.path for item in items if is_full(item)}
    items.sort(key=lambda item: item.path not in long)
    if not config.getoption("--all"):
        chosen = quick(items, config.args)
        left_out = [item for item in items if item not in chosen]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in chosen]


def quick(items, arguments):
    """The first case of each test that is not full, and all of the files that are
    named.
    """
    files = [argument.partition("::")[0] for argument in arguments]
    named = {Path(file).resolve() for file in files if file.endswith(".py")}
    firsts = {}
    for item in items:
        if not is_full(item):
            firsts.setdefault(item.nodeid.partition("[")[0], item)
    return {*firsts.values(), *(item for item in items if item.path in named)}


def is_full(item):
    return item.get_closest_marker("full") is not None


@pytest.fixture(autouse=True)
def the_interpreter_stays():
    """A test that leaves TRITON_INTERPRET changed is named, not those behind it."""
    before = dict(os.environ)
    yield
    after = os.environ.get("TRITON_INTERPRET")
    if "TRITON_INTERPRET" in before:
        os.environ["TRITON_INTERPRET"] = before["TRITON_INTERPRET"]
    assert after == before.get("TRITON_INTERPRET")


@pytest.fixture(autouse=True)
def the_same_random_numbers_in_any_order():
    """A test that passes by itself passes after any other."""
    torch.manual_seed(0)


@contextmanager
def heard(*pieces):
    """The norms of the pieces of these kinds that are computed fused meanwhile."""
    # it imports triton, which asks for TRITON_INTERPRET
    from hf_rmsnorm.fused.watch import watchers

    norms_of_pieces = []

    def hear(piece, norms, x, fused, reason):
        if fused and piece in pieces:
            norms_of_pieces.extend(norms)

    watchers.append(hear)
    yield norms_of_pieces
    watchers.remove(hear)


@pytest.fixture
def fused_calls():
    """The norm of each call that was computed fused, alone or with what surrounds it."""
    from hf_rmsnorm.fused import watch

    with heard(watch.NORM, watch.SUM, watch.QK) as norms:
        yield norms


@pytest.fixture
def fused_sums():
    """The norm of each sum that was computed with it, in one launch."""
    from hf_rmsnorm.fused import watch

    with heard(watch.SUM) as norms:
        yield norms


@pytest.fixture
def no_kernel_here(monkeypatch):
    """As on a CPU outside of the tests: no kernel runs there."""
    from hf_rmsnorm.ops.launches import left_devices

    monkeypatch.setitem(left_devices, ("cpu", None), "there is no kernel here")


@pytest.fixture(autouse=True)
def no_kernel_differs(request):
    """A kernel that differs from what it replaces fails a test, unless that is marked
    `differs`; each test begins with kernels on every device.
    """
    first_use = sys.modules.get("hf_rmsnorm.ops.first_use")
    if first_use is not None:
        first_use.equal_kernels.clear()
    yield
    launches = sys.modules.get("hf_rmsnorm.ops.launches")
    if launches is None or not launches.failed_devices:
        return
    reasons = list(launches.failed_devices.values())
    launches.failed_devices.clear()
    launches.left_devices.clear()
    launches.forget_launches()
    if request.node.get_closest_marker("differs") is None:
        different = [text for text in reasons if "differs from the code" in text]
        assert not different
