"""What every test shares: no network, one thread, kernels that run on the CPU, and the tiers.

``pytest`` runs the quick tier, ``--all`` everything but the nightly tests, ``--nightly`` those alone. A file or a test
that is named runs with its full tests, and ``-m`` chooses by itself. A GPU is there for ``-m gpu`` and tests/gpu alone:
all others launch kernels on CPU tensors. Where only tests/ptx and tests/unit/kernels are asked for, what is compiled of
the kernels is executed there; else, and with TRITON_INTERPRET=1, Triton's interpreter runs them.
"""

import importlib
import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from ptx.driver import run_kernels_on_cpu

torch.set_num_threads(1)  # tiny operators: a second thread only spins

QUICK_SECONDS = 5.0  # of CPU, with the processes that a test waits for: a busy machine stretches wall time, not these
settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("all", max_examples=150, deadline=None)


def pytest_addoption(parser):
    parser.addoption("--model", help="a local checkpoint or a hub id for test_logit_equivalence.py")
    parser.addoption("--all", action="store_true", help="the quick and the full tests: what CI runs")
    parser.addoption("--nightly", action="store_true", help="the nightly tests alone")


def pytest_configure(config):
    for_gpu = re.search(r"(?<!not )\bgpu\b", config.option.markexpr) or any("tests/gpu" in arg for arg in config.args)
    if not for_gpu:
        if "TRITON_INTERPRET" not in os.environ:
            os.environ.update(dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), ""))
        if all(re.search(r"tests/(ptx|unit/kernels)\b", arg) for arg in config.args) and run_kernels_on_cpu():
            from triton.runtime.jit import JITFunction

            JITFunction._do_compile = clock.shares(JITFunction._do_compile)
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which transformers does
    if not config.getoption("--model"):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings.load_profile("quick" if tier(config) == "quick" else "all")


def tier(config):
    if config.option.markexpr:
        return f"-m {config.option.markexpr!r}"
    return "nightly" if config.getoption("--nightly") else "all" if config.getoption("--all") else "quick"


def pytest_report_header(config):
    more = " (--all runs the full tests too, --nightly the long ones)" if tier(config) == "quick" else ""
    return f"tier: {tier(config)}{more}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    chosen = tier(config)
    named = {Path(a.partition("::")[0]).resolve() for a in config.args if a.partition("::")[0].endswith(".py")}

    def runs(item):
        if item.get_closest_marker("nightly") is not None:
            return chosen == "nightly"
        full = item.get_closest_marker("full") is not None
        return chosen == "all" or chosen == "quick" and (not full or item.path in named)

    if not config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
        items[:] = filter(runs, items)
    # Files with full tests first, so that no worker is left with one of them at the end.
    long = {item.path for item in items if item.get_closest_marker("full") is not None}
    items.sort(key=lambda item: item.path not in long)


class Clock:
    """CPU seconds of this process and of the children it has waited for."""

    def __init__(self):
        self.shared = 0.0  # spent in first imports, compiles and fixtures of several tests: no single test is to blame
        self._sharing = False

    def now(self):
        return sum(os.times()[:4])

    def own(self):
        return self.now() - self.shared

    def shares(self, function):
        """`function`, whose time is shared."""

        def timed(*args):
            if self._sharing:
                return function(*args)
            self._sharing, start = True, self.now()
            try:
                return function(*args)
            finally:
                self._sharing = False
                self.shared += self.now() - start

        return timed


clock = Clock()
# Every import of what is not loaded yet passes here.
importlib._bootstrap._find_and_load = clock.shares(importlib._bootstrap._find_and_load)


@pytest.fixture(autouse=True)
def the_same_random_numbers_in_any_order():
    """A test that passes by itself passes after any other."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def small_sums_are_fused_too(monkeypatch):
    """As large ones are: the models here are tiny."""
    monkeypatch.setattr("hf_rmsnorm.fused.layer.LEAST_ELEMENTS", 0)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    start, shared = clock.now(), clock.shared
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            clock.shared = shared + clock.now() - start


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    item.cpu_start, item.own_start = clock.now(), clock.own()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    result = yield
    spent = clock.own() - item.own_start
    marked = item.get_closest_marker("full") or item.get_closest_marker("nightly")
    limit = float(os.environ.get("HF_RMSNORM_QUICK_SECONDS", QUICK_SECONDS))
    if tier(item.config) == "quick" and not marked and 0 < limit < spent:
        pytest.fail(
            f"{spent:.1f} CPU seconds, and a quick test may take {limit:g}: make it cheaper or mark it "
            "@pytest.mark.full (HF_RMSNORM_QUICK_SECONDS sets the limit, 0 none)",
            pytrace=False,
        )
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    if call.when == "teardown":
        item.user_properties.append(("cpu_seconds", round(clock.now() - item.cpu_start, 3)))
    return (yield)


def pytest_terminal_summary(terminalreporter, config):
    done = [r for reports in terminalreporter.stats.values() for r in reports if getattr(r, "when", "") == "teardown"]
    spent = {r.nodeid: value for r in done for name, value in r.user_properties if name == "cpu_seconds"}
    if spent:
        terminalreporter.write_line(f"{sum(spent.values()):.0f} CPU seconds in tests and their fixtures")
    shown = config.option.durations or 0
    for nodeid in sorted(spent, key=spent.get, reverse=True)[:shown]:
        terminalreporter.write_line(f"{spent[nodeid]:8.1f} {nodeid}")


@pytest.fixture
def fused_calls(monkeypatch):
    """The inputs that went through a patched module's fused forward."""
    from hf_rmsnorm.fused import attention as fused_attention
    from hf_rmsnorm.fused import layer as fused_layers
    from hf_rmsnorm.fused import norm as layers

    calls = []

    def spy_on(module, name):
        real = getattr(module, name)

        def spy(x, *args):
            calls.append(x)
            return real(x, *args)

        monkeypatch.setattr(module, name, spy)

    def spy_on_pairs(q, k, *args, real=fused_attention.fused_qk_norm, **kwargs):
        calls.extend((q, k))
        return real(q, k, *args, **kwargs)

    spy_on(layers, "fused_norm")
    spy_on(layers, "launched_norm")
    spy_on(fused_layers, "fused_add_norm")
    monkeypatch.setattr(fused_attention, "fused_qk_norm", spy_on_pairs)
    return calls


@pytest.fixture
def taken(monkeypatch):
    """How many outputs were taken that a sum's launch had left, and how many were left."""
    counts = {"left": 0, "taken": 0}
    from hf_rmsnorm.fused import handover as handover_module
    from hf_rmsnorm.fused import layer as fused_layers
    from hf_rmsnorm.fused import norm as layers

    def hand_over(*args):
        counts["left"] += 1
        handover_module.hand_over(*args)

    def handed_over(*args):
        output = handover_module.handed_over(*args)
        counts["taken"] += output is not None
        return output

    monkeypatch.setattr(fused_layers, "hand_over", hand_over)
    monkeypatch.setattr(layers, "handed_over", handed_over)
    return counts
