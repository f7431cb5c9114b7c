"""How far logits are apart, and how far each side is from float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .tolerance import FACTOR, ulp

_MASKED = 1e30  # models hide words of the vocabulary with -inf or the dtype's lowest value: no logit is that large
_ROWS = 64  # tokens at a time in float64: bounds the memory a large vocabulary needs


@dataclass(frozen=True)
class LogitDifference:
    """Candidate against reference, over every token that the attention mask keeps.

    ``max_abs`` and ``mean_abs`` are of the logits' difference; ``kl_mean`` and ``kl_max`` are KL(reference ||
    candidate) per token in nats, computed in float64; ``top1_agreement`` is the fraction of tokens with the same
    most likely word.
    """

    tokens: int
    vocabulary: int
    max_abs: float
    mean_abs: float
    kl_mean: float
    kl_max: float
    top1_agreement: float


@dataclass(frozen=True)
class NoiseFloor:
    """Verdict (a): both models' errors against a float64 run of the reference.

    ``*_max`` and ``*_rms`` are over all logits. The candidate passes if, for each of the two,
    ``candidate <= 1.5 * reference + slack``. The slack stands for the last rounding of the logits, whose luck is not
    the model's: a logit is only ever stored on its dtype's grid, so the largest error of two equally good runs may
    differ by one step of that grid where it is widest (``max_slack``: 1 ulp of max|y64|), and a uniform error of one
    step at the typical logit has an RMS of 1/sqrt(12) of it (``rms_slack``, with the ulp of RMS(y64)). The RMS is an
    average over thousands of logits, so it gets no more than that. In float32 both are near 1e-7 of the logits,
    below the run's own error and far below what a wrong eps does.
    """

    dtype: str
    reference_max: float
    reference_rms: float
    candidate_max: float
    candidate_rms: float
    max_slack: float
    rms_slack: float
    reason: str = ""

    @property
    def allowed_max(self) -> float:
        return FACTOR * self.reference_max + self.max_slack

    @property
    def allowed_rms(self) -> float:
        return FACTOR * self.reference_rms + self.rms_slack

    @property
    def max_passed(self) -> bool:
        return math.isfinite(self.candidate_max) and self.candidate_max <= self.allowed_max

    @property
    def rms_passed(self) -> bool:
        return math.isfinite(self.candidate_rms) and self.candidate_rms <= self.allowed_rms

    @property
    def passed(self) -> bool:
        return not self.reason and self.max_passed and self.rms_passed


class _Error:
    """Max and RMS of |y - y64| over the logits that float64 gives a finite value; NaN counts as infinite."""

    def __init__(self):
        self.max, self.squares, self.count = 0.0, 0.0, 0

    def add(self, y: torch.Tensor, y64: torch.Tensor, keep: torch.Tensor) -> None:
        d = (y.double() - y64)[keep].abs().nan_to_num(nan=math.inf, posinf=math.inf)
        if d.numel():
            self.max = max(self.max, d.max().item())
            self.squares += d.square().sum().item()
            self.count += d.numel()

    @property
    def rms(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else 0.0


def compare_logits(
    reference: list[torch.Tensor], candidate: list[torch.Tensor], exact: list[torch.Tensor]
) -> tuple[LogitDifference, NoiseFloor]:
    """Measure logits against each other and both against float64.

    Args:
        reference, candidate: per input (tokens, vocabulary), in the dtype the model returned.
        exact: the same shapes, float64, from the reference in float64.

    Returns:
        The difference and the noise floor. Words hidden from the vocabulary (-inf or the lowest value of a dtype) are
        left out of the noise floor; where only one model hides them, ``max_abs`` is infinite. The noise floor fails,
        with a reason, where there is nothing to compare or something is not finite.
    """
    own, other, size = _Error(), _Error(), _Error()
    max_abs = sum_abs = kl_sum = kl_max = 0.0
    agree = tokens = count = 0
    finite = True
    triples = [each for each in zip(reference, candidate, exact, strict=True) if each[0].numel()]
    if not triples:
        nothing = NoiseFloor(
            "", 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "there is nothing to compare: the inputs gave no outputs"
        )
        return LogitDifference(0, 0, 0.0, 0.0, 0.0, 0.0, 0.0), nothing
    for full_r, full_c, full_y in triples:
        for r, c, y in zip(full_r.split(_ROWS), full_c.split(_ROWS), full_y.split(_ROWS), strict=True):
            keep = y.abs() < _MASKED
            finite = finite and bool((keep | (y <= -_MASKED)).all())
            own.add(r, y, keep)
            other.add(c, y, keep)
            size.add(y, torch.zeros_like(y), keep)
            d = torch.where(r == c, 0.0, r.double() - c.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            kl = _kl(r, c)
            max_abs, kl_max = max(max_abs, d.max().item()), max(kl_max, kl.max().item())
            sum_abs, kl_sum = sum_abs + d.sum().item(), kl_sum + kl.sum().item()
            agree += (r.argmax(-1) == c.argmax(-1)).sum().item()
            tokens, count = tokens + len(d), count + d.numel()
    dtype = torch.promote_types(reference[0].dtype, candidate[0].dtype)
    steps = ulp(torch.tensor([size.max, size.rms], dtype=torch.float64), dtype).tolist()
    reason = ""
    if not finite:
        reason = "the reference gives NaN or infinity in float64 too: look for NaN or infinity in its weights"
    elif not size.count:
        reason = "there is nothing to compare: every output is that of a hidden word"
    elif not math.isfinite(own.max):
        reason = f"the reference itself gives NaN or infinity in {dtype}: load it in bfloat16 or float32"
    elif not math.isfinite(other.max):
        reason = "the candidate gives NaN or infinity where the reference does not"
    floor = NoiseFloor(
        str(dtype).removeprefix("torch."),
        own.max,
        own.rms,
        other.max,
        other.rms,
        steps[0],
        steps[1] / math.sqrt(12),
        reason,
    )
    difference = LogitDifference(
        tokens, reference[0].shape[-1], max_abs, sum_abs / count, kl_sum / tokens, kl_max, agree / tokens
    )
    return difference, floor


def _kl(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    log_p, log_q = reference.double().log_softmax(-1), candidate.double().log_softmax(-1)
    p = log_p.exp()
    terms = torch.where((p > 0) | log_p.isnan(), p * (log_p - log_q), 0.0)
    return terms.sum(-1).clamp_min(0.0).nan_to_num(nan=math.inf)
