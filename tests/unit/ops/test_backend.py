"""Which devices run kernels, and how they are started there."""

import pytest
import torch

from hf_rmsnorm.ops import backend
from hf_rmsnorm.ops.backend import _device_refusal, launch_path, runs_on


@pytest.mark.parametrize(
    "device_type, hip, capability, served",
    [
        ("cuda", None, (8, 0), True),
        ("cuda", None, (7, 5), True),
        ("cuda", None, (7, 2), False),
        ("cuda", None, (6, 1), False),
        ("cuda", "6.4", (6, 1), True),
        ("xpu", None, None, True),
        ("mps", None, None, False),
        ("cpu", None, None, False),
        ("meta", None, None, False),
    ],
)
def test_which_devices_kernels_run_on(
    device_type, hip, capability, served, monkeypatch
):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert (_device_refusal.__wrapped__(device_type, 0) is None) == served


@pytest.mark.parametrize(
    "built_for, served", [(["sm_70", "sm_75"], True), (["sm_75", "sm_80"], False)]
)
def test_a_v100_is_served_where_torch_is_built_for_it(built_for, served, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    said = _device_refusal.__wrapped__("cuda", 0)
    assert (
        said is None
        if served
        else said.startswith(
            "this GPU has compute capability 7.0; the kernels serve 7.5 (T4"
        )
    )


def test_the_path_of_launches_is_named_where_it_is_slow(monkeypatch):
    c_launcher = pytest.importorskip("hf_rmsnorm.kernels.c_launcher")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(backend, "_device_refusal", lambda *_: None)
    assert launch_path() == "direct"
    assert runs_on("cpu")["reason"] == "fused Triton kernels"
    monkeypatch.setattr(c_launcher, "KNOWN", False)
    path = launch_path()
    assert path.startswith("through Triton's dispatch, about three times the host time")
    assert runs_on("cpu")["reason"] == f"fused Triton kernels, launched {path}"
