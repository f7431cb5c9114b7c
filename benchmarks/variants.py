"""The ways in which a model is measured: unpatched, patched, with Liger's kernels, and
with both.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn

from benchmarks.speed import UNPATCHED
from hf_rmsnorm import PatchReport, patched

# arguments of Liger's `apply_liger_kernel_to_*`
ALL_KERNELS: dict[str, bool] = {}
MLP_AND_LOSS = {"rms_norm": False, "rope": False}


@dataclass(frozen=True)
class Variant:
    """Options of `patch_model`, and of Liger's patch of a model; None: without it."""

    ours: dict[str, bool] | None = None
    liger: dict[str, bool] | None = None

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[PatchReport | None]:
        """The model is this variant in a ``with``, which gives the report of
        `patch_model`.
        """
        with ExitStack() as stack:
            if self.liger is not None:
                stack.enter_context(liger_kernels(model, **self.liger))
            report = None
            if self.ours is not None:
                report = stack.enter_context(patched(model, **self.ours))
            yield report


OURS, LIGER, BOTH = "patch_model", "liger", "patch_model_liger"
TIMED = {
    UNPATCHED: Variant(),
    OURS: Variant(ours={}),
    LIGER: Variant(liger=ALL_KERNELS),
    BOTH: Variant(ours={}, liger=MLP_AND_LOSS),
}
LIGER_IS_WHOLE = "all its kernels"


def timed_variants(model_type: str) -> tuple[dict[str, Variant], str]:
    """The variants that can be measured here, and what is measured of Liger or why it
    is not.
    """
    try:
        _liger_patch(model_type)
    except Exception as error:
        # a peer may be missing or fail in any way it likes
        without = {n: v for n, v in TIMED.items() if v.liger is None}
        return without, in_words(error)
    return TIMED, LIGER_IS_WHOLE


def in_words(error: Exception) -> str:
    """An exception in one short line."""
    return f"{type(error).__name__}: {error}"[:300]


@contextmanager
def liger_kernels(model: nn.Module, **options: bool) -> Iterator[None]:
    """The model with what Liger swaps by default, or as the options of its patch say.

    Liger gives the instances other forwards, and the model's Python module other
    classes, which the next model would get. The end puts both back.
    """
    patch = _liger_patch(model.config.model_type)
    spaces = [vars(sys.modules[type(model).__module__])]
    spaces += [vars(module) for module in model.modules()]
    before = [dict(space) for space in spaces]
    try:
        patch(model=model, **options)
        yield
    finally:
        for space, attributes in zip(spaces, before, strict=True):
            for name in space.keys() - attributes.keys():
                del space[name]
            space.update(attributes)


def _liger_patch(model_type: str):
    from liger_kernel import transformers as liger

    return getattr(liger, f"apply_liger_kernel_to_{model_type}")
