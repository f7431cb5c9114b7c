"""Loads two modules when they are first needed: launch code needs triton, and the rules
of DTensor take long.
"""

import sys
from functools import cache
from types import SimpleNamespace

from torch.compiler import assume_constant_result

from ..kernels.failure import unavailable


@cache
def kernels() -> SimpleNamespace:
    """The launches of the kernels, by name.

    Raises:
        KernelUnavailable: Triton cannot be imported, or reads no source of the kernels.
    """
    try:
        from ..kernels import launch, launch_backward, launch_qk
    except Exception as error:
        raise unavailable(error) from error
    return SimpleNamespace(
        NormForward=launch.NormForward,
        NormBackward=launch_backward.NormBackward,
        QKForward=launch_qk.QKForward,
        QKBackward=launch_qk.QKBackward,
        Rotary=launch_qk.Rotary,
    )


@assume_constant_result
def load_sharding_rules() -> bool:
    """Register how DTensors are split, once one can exist."""
    if "torch.distributed.tensor" in sys.modules:
        from . import sharding  # noqa: F401  registers on import
    return True


def is_dtensor(t) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)
