"""How far two models are from a float64 run, and from each other: of their outputs, of a
fused layer, of one gradient.
"""

import math
from dataclasses import dataclass

import torch

from .tolerance import FACTOR, ulp, within

# models hide words of the vocabulary with -inf or the dtype's lowest value: no logit is
# that small
_HIDDEN = -1e30
_ROWS = 64  # tokens at a time in float64: bounds the memory a large vocabulary needs


@dataclass(frozen=True)
class NoiseFloor:
    """The errors of a reference and of a candidate against float64, the largest and the
    RMS over all values.

    The candidate passes if each of the two is at most ``1.5 * reference + slack``. For
    logits ``max_slack`` is 1 ulp of max|y64|, ``rms_slack`` 1/sqrt(12) ulp of
    RMS(y64), which is the last rounding's part. ``reason`` is why it fails besides.
    ``difference`` is the largest one between candidate and reference, over ``rows``
    rows: the tokens that the attention mask keeps.
    """

    dtype: str = ""
    rows: int = 0
    difference: float = 0.0
    reference_max: float = 0.0
    reference_rms: float = 0.0
    candidate_max: float = 0.0
    candidate_rms: float = 0.0
    max_slack: float = 0.0
    rms_slack: float = 0.0
    reason: str = ""

    @property
    def allowed_max(self) -> float:
        return FACTOR * self.reference_max + self.max_slack

    @property
    def passed(self) -> bool:
        return (
            not self.reason
            and within(self.candidate_max, self.reference_max, self.max_slack)
            and within(self.candidate_rms, self.reference_rms, self.rms_slack)
        )

    @property
    def text(self) -> str:
        """The errors in words, or the reason."""
        if self.reason:
            return self.reason
        text = (
            "off by {:.3g}, the original by {:.3g} (limit {:.3g}); "
            "RMS {:.3g} and {:.3g} (limit {:.3g})"
        )
        return text.format(
            self.candidate_max,
            self.reference_max,
            self.allowed_max,
            self.candidate_rms,
            self.reference_rms,
            FACTOR * self.reference_rms + self.rms_slack,
        )


class Sizes:
    """Maximum and RMS of the absolute values added, in float64; NaN counts as infinite,
    no value as 0.
    """

    def __init__(self):
        self.max = 0.0
        self.count = 0
        self._squares = 0.0

    def add(self, values: torch.Tensor) -> None:
        if values.numel():
            values = values.abs().nan_to_num(math.inf, math.inf)
            self.max = max(self.max, values.max().item())
            self.count += values.numel()
            self._squares += values.square().sum().item()

    @property
    def rms(self) -> float:
        return math.sqrt(self._squares / max(self.count, 1))


def noise_floor(
    reference: list[torch.Tensor],
    candidate: list[torch.Tensor],
    exact: list[torch.Tensor],
    quantised: bool = False,
) -> NoiseFloor:
    """Measure the outputs of two models, which are rows, against those of the reference
    in float64, and against each other.

    The errors leave out hidden words (-inf or the lowest value of a dtype); where only
    one model hides them, ``difference`` is infinite.

    A model with quantised weights rounds its activations to half precision or to codes,
    whatever its logits' dtype: an ulp of float32 in a norm tips one of these steps or
    it does not. So its last rounding counts as one of bfloat16.
    """
    original, changed, size, difference = Sizes(), Sizes(), Sizes(), Sizes()
    for outputs in zip(reference, candidate, exact, strict=True):
        blocks = [y.split(_ROWS) for y in outputs]
        for r, c, y in zip(*blocks, strict=True):
            shown = ~(y <= _HIDDEN)
            original.add((r.double() - y)[shown])
            changed.add((c.double() - y)[shown])
            size.add(y[shown])
            difference.add(torch.where(r == c, 0.0, r.double() - c.double()))
    dtype = torch.promote_types(reference[0].dtype, candidate[0].dtype)
    if quantised:
        dtype = torch.bfloat16
    sizes = torch.tensor([size.max, size.rms], dtype=torch.float64)
    max_step, rms_step = ulp(sizes, dtype).tolist()
    reason = ""
    if not size.count:
        reason = "there is nothing to compare: the inputs gave no outputs"
    elif size.max == math.inf:
        reason = "the original gives NaN or infinity in float64 too: look for NaN or infinity in its weights"
    elif original.max == math.inf:
        reason = (
            "the original itself gives NaN or infinity: load it in bfloat16 or float32"
        )
    elif changed.max == math.inf:
        reason = "the changed model gives NaN or infinity where the original does not"
    return NoiseFloor(
        dtype=str(dtype).removeprefix("torch."),
        rows=sum(map(len, reference)),
        difference=difference.max,
        reference_max=original.max,
        reference_rms=original.rms,
        candidate_max=changed.max,
        candidate_rms=changed.rms,
        max_slack=max_step,
        rms_slack=rms_step / math.sqrt(12),
        reason=reason,
    )
