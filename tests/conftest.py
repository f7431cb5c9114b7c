"""What every test shares: no network, one thread, and Triton's interpreter where there is no GPU."""

import os

import pytest
import torch

if not (torch.cuda.is_available() or torch.xpu.is_available()):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which transformers does
torch.set_num_threads(1)  # tiny operators: a second thread only spins


def pytest_addoption(parser):
    parser.addoption("--model", help="a local checkpoint or a hub id for test_logit_equivalence.py")


def pytest_configure(config):
    if not config.getoption("--model"):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


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

    def leave(*args):
        counts["left"] += 1
        handover_module.leave(*args)

    def take(*args):
        output = handover_module.take(*args)
        counts["taken"] += output is not None
        return output

    monkeypatch.setattr(fused_layers, "leave", leave)
    monkeypatch.setattr(layers, "take", take)
    return counts
