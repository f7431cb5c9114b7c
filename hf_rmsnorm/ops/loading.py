"""What is loaded when it is first needed: launch code, which needs triton, and DTensor's rules, which take long."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module

import torch


@cache
def kernels(name: str = "launch"):
    """The launch code of the norms, or (``"launch_qk"``) of queries and keys."""
    return import_module(f"..kernels.{name}", __package__)


@torch.compiler.assume_constant_result
def load_sharding_rules() -> bool:
    """Register how DTensors are split, once one can exist."""
    if "torch.distributed.tensor" in sys.modules:
        import_module(".sharding", __package__)  # registers on import
    return True


def is_dtensor(t) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)
