"""Loads two modules when they are first needed: launch code needs triton, and the rules
of DTensor take long.
"""

import sys
from functools import cache

import torch

from ..kernels.failure import unavailable


@cache
def kernels():
    """The launch code of the norms.

    Raises:
        KernelUnavailable: Triton cannot be imported, or reads no source of the kernels.
    """
    try:
        from ..kernels import launch
    except Exception as error:
        raise unavailable(error) from error
    return launch


@cache
def backward_kernels():
    """The launch code of their backwards; raises as `kernels` does."""
    kernels()
    from ..kernels import launch_backward

    return launch_backward


@cache
def qk_kernels():
    """The launch code of queries and keys; raises as `kernels` does."""
    kernels()
    from ..kernels import launch_qk

    return launch_qk


@torch.compiler.assume_constant_result
def load_sharding_rules() -> bool:
    """Register how DTensors are split, once one can exist."""
    if "torch.distributed.tensor" in sys.modules:
        from . import sharding  # noqa: F401  registers on import
    return True


def is_dtensor(t) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)
