"""How far logits are apart, and how far each side is from float64."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .tolerance import FACTOR, ulp, within

# models hide words of the vocabulary with -inf or the dtype's lowest value: no logit is
# that large
_MASKED = 1e30
_ROWS = 64  # tokens at a time in float64: bounds the memory a large vocabulary needs


@dataclass(frozen=True)
class LogitDifference:
    """Candidate against reference, over every token that the attention mask keeps.

    ``max_abs`` and ``mean_abs`` are of the logits' difference, ``kl_mean`` and
    ``kl_max`` of KL(reference || candidate) per token in nats, ``top1_agreement`` is
    the fraction of tokens with the same most likely word. A model without logits has no
    ``vocabulary``: what else it returns is compared, ``tokens`` rows of it, by the
    first two alone.
    """

    tokens: int = 0
    vocabulary: int = 0
    max_abs: float = 0.0
    mean_abs: float = 0.0
    kl_mean: float = 0.0
    kl_max: float = 0.0
    top1_agreement: float = 0.0


@dataclass(frozen=True)
class NoiseFloor:
    """Verdict (a): both models' errors against a float64 run of the reference, the
    largest and the RMS over all logits.

    The candidate passes if each of the two is at most ``1.5 * reference + slack``:
    ``max_slack`` is 1 ulp of max|y64|, ``rms_slack`` 1/sqrt(12) ulp of RMS(y64), which
    is the last rounding's part. ``reason`` is why it fails besides.
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
    def max_passed(self) -> bool:
        return within(self.candidate_max, self.reference_max, self.max_slack)

    @property
    def rms_passed(self) -> bool:
        return within(self.candidate_rms, self.reference_rms, self.rms_slack)

    @property
    def passed(self) -> bool:
        return not self.reason and self.max_passed and self.rms_passed


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
        values = values.abs().nan_to_num(nan=math.inf, posinf=math.inf)
        if values.numel():
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
    if not any(rows.numel() for rows in reference):
        return LogitDifference(), NoiseFloor(
            reason="there is nothing to compare: the inputs gave no outputs"
        )
    own, other, size, difference, divergence = (Sizes() for _ in range(5))
    tokens, agree, finite = 0, 0, True
    for r, c, y in _blocks(reference, candidate, exact):
        keep = y.abs() < _MASKED
        finite = finite and bool((keep | (y <= -_MASKED)).all())
        own.add((r.double() - y)[keep])
        other.add((c.double() - y)[keep])
        size.add(y[keep])
        difference.add(torch.where(r == c, 0.0, r.double() - c.double()))
        tokens += len(r)
        if are_logits:
            divergence.add(_kl(r, c))
            agree += (r.argmax(-1) == c.argmax(-1)).sum().item()
    dtype = (
        torch.bfloat16
        if quantised
        else torch.promote_types(reference[0].dtype, candidate[0].dtype)
    )
    max_step, rms_step = ulp(
        torch.tensor([size.max, size.rms], dtype=torch.float64), dtype
    ).tolist()
    floor = NoiseFloor(
        dtype=str(dtype).removeprefix("torch."),
        reference_max=own.max,
        reference_rms=own.rms,
        candidate_max=other.max,
        candidate_rms=other.rms,
        max_slack=max_step,
        rms_slack=rms_step / math.sqrt(12),
        reason=_why_incomparable(own, other, size, finite, dtype),
    )
    between = LogitDifference(
        tokens=tokens,
        vocabulary=reference[0].shape[-1] if are_logits else 0,
        max_abs=difference.max,
        mean_abs=difference.mean,
        kl_mean=divergence.mean,
        kl_max=divergence.max,
        top1_agreement=agree / tokens,
    )
    return between, floor


def _blocks(*outputs: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """A few rows at a time of tensors that belong together."""
    for tensors in zip(*outputs, strict=True):
        if tensors[0].numel():
            yield from zip(*(t.split(_ROWS) for t in tensors), strict=True)


def _why_incomparable(
    own: Sizes, other: Sizes, size: Sizes, finite: bool, dtype: torch.dtype
) -> str:
    if not finite:
        return "the original gives NaN or infinity in float64 too: look for NaN or infinity in its weights"
    if not size.count:
        return "there is nothing to compare: every output is that of a hidden word"
    if own.max == math.inf:
        return f"the original itself gives NaN or infinity in {dtype}: load it in bfloat16 or float32"
    if other.max == math.inf:
        return "the changed model gives NaN or infinity where the original does not"
    return ""


def _kl(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    log_p, log_q = (
        reference.double().log_softmax(-1),
        candidate.double().log_softmax(-1),
    )
    p = log_p.exp()
    terms = torch.where((p > 0) | log_p.isnan(), p * (log_p - log_q), 0.0)
    return terms.sum(-1).clamp_min(0.0)
