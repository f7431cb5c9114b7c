"""How far logits are apart, and how far each side is from float64."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .tolerance import FACTOR, ulp, within

# models hide words of the vocabulary with -inf or the dtype's lowest value: no logit is
# that small
_HIDDEN = -1e30
_ROWS = 64  # tokens at a time in float64: bounds the memory a large vocabulary needs


@dataclass(frozen=True)
class LogitDifference:
    """Candidate against reference, over every token that the attention mask keeps.

    ``max_abs`` is the largest difference of two logits, ``kl_mean`` the mean of
    KL(reference || candidate) per token in nats, ``top1_agreement`` the fraction of
    tokens with the same most likely word. A model without logits has no ``vocabulary``:
    ``tokens`` rows of what else it returns are compared, by the first alone.
    """

    tokens: int = 0
    vocabulary: int = 0
    max_abs: float = 0.0
    kl_mean: float = 0.0
    top1_agreement: float = 0.0


@dataclass(frozen=True)
class NoiseFloor:
    """The errors of a reference and of a candidate against float64, the largest and the
    RMS over all values.

    The candidate passes if each of the two is at most ``1.5 * reference + slack``. For
    logits ``max_slack`` is 1 ulp of max|y64|, ``rms_slack`` 1/sqrt(12) ulp of
    RMS(y64), which is the last rounding's part. ``reason`` is why it fails besides.
    """

    dtype: str = ""
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
    def allowed_rms(self) -> float:
        return FACTOR * self.reference_rms + self.rms_slack

    @property
    def passed(self) -> bool:
        if self.reason:
            return False
        largest = within(self.candidate_max, self.reference_max, self.max_slack)
        return largest and within(
            self.candidate_rms, self.reference_rms, self.rms_slack
        )

    @property
    def text(self) -> str:
        """The errors in words, or the reason."""
        if self.reason:
            return self.reason
        largest = (
            f"off by {self.candidate_max:.3g}, the original by {self.reference_max:.3g}"
        )
        rms = f"RMS {self.candidate_rms:.3g} and {self.reference_rms:.3g}"
        return f"{largest} (limit {self.allowed_max:.3g}); {rms} (limit {self.allowed_rms:.3g})"


class Sizes:
    """Maximum, mean and RMS of the absolute values added, in float64; NaN counts as
    infinite, no value as 0.
    """

    def __init__(self, *values: torch.Tensor):
        self.max = self._sum = self._squares = 0.0
        self.count = 0
        for tensor in values:
            self.add(tensor)

    def add(self, values: torch.Tensor) -> None:
        if values.numel():
            values = values.abs().nan_to_num(nan=math.inf, posinf=math.inf)
            self.max = max(self.max, values.max().item())
            self._sum += values.sum().item()
            self._squares += values.square().sum().item()
            self.count += values.numel()

    @property
    def mean(self) -> float:
        return self._sum / max(self.count, 1)

    @property
    def rms(self) -> float:
        return math.sqrt(self._squares / max(self.count, 1))


def compare_logits(
    reference: list[torch.Tensor],
    candidate: list[torch.Tensor],
    exact: list[torch.Tensor],
    are_logits: bool = True,
    quantised: bool = False,
) -> tuple[LogitDifference, NoiseFloor]:
    """Measure logits against each other, and both against those of the reference in
    float64.

    For each input they are (tokens, vocabulary), in the dtype the model returned. The
    floor leaves out hidden words (-inf or the lowest value of a dtype); where only one
    model hides them, ``max_abs`` is infinite.

    A model with quantised weights rounds its activations to half precision or to codes,
    whatever its logits' dtype: an ulp of float32 in a norm tips one of these steps or
    it does not. So its last rounding counts as one of bfloat16.
    """
    original, changed, size, difference, divergence = (Sizes() for _ in range(5))
    tokens = agree = 0
    for r, c, y in _blocks(reference, candidate, exact):
        shown = ~(y <= _HIDDEN)
        original.add((r.double() - y)[shown])
        changed.add((c.double() - y)[shown])
        size.add(y[shown])
        difference.add(torch.where(r == c, 0.0, r.double() - c.double()))
        tokens += len(r)
        if are_logits:
            divergence.add(_kl(r, c))
            agree += (r.argmax(-1) == c.argmax(-1)).sum().item()
    if not size.count:
        why = "there is nothing to compare: the inputs gave no outputs"
        return LogitDifference(), NoiseFloor(reason=why)
    dtype = torch.promote_types(reference[0].dtype, candidate[0].dtype)
    if quantised:
        dtype = torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    sizes = torch.tensor([size.max, size.rms], dtype=torch.float64)
    max_step, rms_step = ulp(sizes, dtype).tolist()
    floor = NoiseFloor(
        dtype=name,
        reference_max=original.max,
        reference_rms=original.rms,
        candidate_max=changed.max,
        candidate_rms=changed.rms,
        max_slack=max_step,
        rms_slack=rms_step / math.sqrt(12),
        reason=_why_incomparable(original, changed, size, name),
    )
    between = LogitDifference(
        tokens=tokens,
        vocabulary=reference[0].shape[-1] if are_logits else 0,
        max_abs=difference.max,
        kl_mean=divergence.mean,
        top1_agreement=agree / tokens,
    )
    return between, floor


def _blocks(*outputs: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """A few rows at a time of tensors that belong together."""
    for tensors in zip(*outputs, strict=True):
        if tensors[0].numel():
            yield from zip(*(t.split(_ROWS) for t in tensors), strict=True)


def _why_incomparable(original: Sizes, changed: Sizes, size: Sizes, dtype: str) -> str:
    if size.max == math.inf:
        return "the original gives NaN or infinity in float64 too: look for NaN or infinity in its weights"
    if original.max == math.inf:
        return f"the original itself gives NaN or infinity in {dtype}: load it in bfloat16 or float32"
    if changed.max == math.inf:
        return "the changed model gives NaN or infinity where the original does not"
    return ""


def _kl(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    log_p = reference.double().log_softmax(-1)
    log_q = candidate.double().log_softmax(-1)
    p = log_p.exp()
    terms = torch.where((p > 0) | log_p.isnan(), p * (log_p - log_q), 0.0)
    return terms.sum(-1).clamp_min(0.0)
