"""What a verification found: plain records, one verdict, a table."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from .modules import NormCheck
from .noise import LogitDifference, NoiseFloor
from .pieces import GradientCheck

_SHOWN = 6
NOTHING_RAN = "nothing to verify: no kernel ran"


@dataclass(frozen=True)
class GreedyDifference:
    """Where greedy generation first differs: in prompt ``row`` of input ``index``, at new token ``step`` (from 0).

    ``margin`` is by how much the reference's logits prefer its token there, ``tie_margin`` how much can be explained by
    both models' errors against float64, as far as the noise floor allows them: up to that the two words are a tie.
    """

    index: int
    row: int
    step: int
    reference_token: int
    candidate_token: int
    margin: float
    tie_margin: float

    @property
    def is_tie(self) -> bool:
        return self.margin <= self.tie_margin


@dataclass(frozen=True)
class GreedyComparison:
    """Greedy generation by both models: passed if all tokens are equal up to a tie, and ``first_difference`` if any.

    ``sequences`` prompts were continued, the longest by ``new_tokens`` tokens; 0 where nothing was generated, with
    the reason.
    """

    sequences: int
    new_tokens: int
    first_difference: GreedyDifference | None = None
    reason: str = ""

    @property
    def equal(self) -> bool:
        return self.first_difference is None

    @property
    def passed(self) -> bool:
        return self.first_difference is None or self.first_difference.is_tie


@dataclass(frozen=True)
class EquivalenceReport:
    """The outcome of :func:`verify_equivalence`; ``print(report)`` is a table with a verdict on every line.

    Attributes:
        model: class name of the reference.
        dtype, device: of the reference's parameters.
        logits: candidate against reference.
        noise_floor: verdict (a).
        norms: verdict (b), one record per changed module; None if it was not asked for.
            Those in `unreached` were not run by the inputs; if that is all of them, (b) fails.
        fused: the same verdict on each thing that the candidate computes together: a sum with the norm that reads it,
            or q and k norm with what rotates them.
        gradients: of each patched norm and each of those; None if they were not asked for.
        nothing_ran: no kernel served the candidate, which is the reference patched: it was compared with itself.
        greedy: whether both generate the same tokens.
        launches: Triton kernels that the candidate launched, by kernel name; empty if none ran.
        backend: what `use_backend` was to choose for the candidate; None left the choice in force.
    """

    model: str
    dtype: str
    device: str
    logits: LogitDifference
    noise_floor: NoiseFloor
    norms: tuple[NormCheck, ...] | None
    greedy: GreedyComparison
    launches: dict[str, int]
    backend: str | None
    fused: tuple[NormCheck, ...] = ()
    gradients: tuple[GradientCheck, ...] | None = None
    nothing_ran: bool = False

    @property
    def norms_passed(self) -> bool:
        """No norm failed; and where norms were to be checked, the inputs reached at least one."""
        norms = self.norms or ()
        return all(norm.passed for norm in norms) and (not norms or any(norm.reached for norm in norms))

    @property
    def unreached(self) -> tuple[str, ...]:
        """Paths of the norms that these inputs did not run, about which nothing is proven."""
        return tuple(norm.path for norm in self.norms or () if not norm.reached)

    @property
    def passed(self) -> bool:
        """All verdicts hold, no greedy token differs beyond a tie, and something ran that could differ."""
        return self.agrees and not self.nothing_ran

    @property
    def agrees(self) -> bool:
        """All verdicts hold, whatever it was that ran."""
        pieces = (*self.fused, *(self.gradients or ()))
        return (
            self.noise_floor.passed
            and self.norms_passed
            and self.greedy.passed
            and all(piece.passed for piece in pieces)
        )

    @property
    def verdict(self) -> str:
        """``"PASS"``, ``"FAIL"``, or that there was nothing to verify."""
        return "PASS" if self.passed else NOTHING_RAN if self.agrees else "FAIL"

    def to_dict(self) -> dict:
        """Every field and verdict as plain JSON values; a number that is not finite becomes a string."""
        data = dataclasses.asdict(self)
        data["passed"], data["verdict"] = self.passed, self.verdict
        floor, greedy = self.noise_floor, self.greedy
        data["noise_floor"] |= {"allowed_max": floor.allowed_max, "allowed_rms": floor.allowed_rms}
        data["noise_floor"]["passed"] = floor.passed
        data["norms_passed"], data["unreached"] = self.norms_passed, self.unreached
        data["greedy"] |= {"equal": greedy.equal, "passed": greedy.passed}
        if greedy.first_difference is not None:
            data["greedy"]["first_difference"]["is_tie"] = greedy.first_difference.is_tie
        return plain(data)

    def __str__(self) -> str:
        logits, floor = self.logits, self.noise_floor
        lines = [
            f"{self.model}, {self.dtype} on {self.device}: {logits.tokens} tokens, vocabulary {logits.vocabulary}",
            _line(
                "logits against reference",
                f"max {logits.max_abs:.3g}, mean {logits.mean_abs:.3g}, KL per token {logits.kl_mean:.2g} "
                f"(max {logits.kl_max:.2g}), top-1 equal {logits.top1_agreement:.2%}",
            ),
            _line(
                "(a) max error to float64",
                f"reference {floor.reference_max:.3g}, candidate {floor.candidate_max:.3g}, "
                f"allowed {floor.allowed_max:.3g}",
                floor.max_passed,
                floor.reason,
            ),
            _line(
                "    RMS error to float64",
                f"reference {floor.reference_rms:.3g}, candidate {floor.candidate_rms:.3g}, "
                f"allowed {floor.allowed_rms:.3g}",
                floor.rms_passed,
            ),
            *self._norm_lines(),
            *self._fused_lines(),
            *self._gradient_lines(),
            _line("greedy generation", self._greedy_text(), self.greedy.passed if self.greedy.sequences else None),
            _line("Triton kernels launched", self._launch_text()),
            *self._verdict_lines(),
        ]
        return "\n".join(lines)

    def _norm_lines(self) -> list[str]:
        if self.norms is None:
            return [_line("(b) norm by norm", "not asked for")]
        if not self.norms:
            return [_line("(b) norm by norm", "no leaf module differs between reference and candidate", True)]
        compared = [norm for norm in self.norms if norm.elements or not norm.passed]
        good = sum(norm.passed for norm in compared)
        others = f", {len(self.norms) - len(compared)} not compared" if len(compared) < len(self.norms) else ""
        text = f"{good} of {len(compared)} agree with their originals{others}"
        lines = [_line("(b) norm by norm", text, self.norms_passed)]
        worst = sorted(self.norms, key=lambda n: (n.passed, not n.reason, -n.off, -n.worst_ulp))
        for norm in worst[:_SHOWN]:
            off = f"{norm.off} of {norm.elements} off ({norm.allowed} allowed)"
            text = f"{norm.dtype}, {off}, worst {norm.worst_ulp:.2g} ulp" if norm.elements else ""
            lines.append(_line(f"      {norm.path}", text, norm.passed if norm in compared else None, norm.reason))
        if len(self.norms) > _SHOWN:
            lines.append(f"      ... and {len(self.norms) - _SHOWN} that do no worse")
        return lines

    def _fused_lines(self) -> list[str]:
        if not self.fused:
            return []
        good = sum(check.passed for check in self.fused)
        lines = [_line("    computed together", f"{good} of {len(self.fused)} agree with their originals",
                       good == len(self.fused))]  # fmt: skip
        for check in sorted(self.fused, key=lambda c: (c.passed, -c.off))[:_SHOWN]:
            if not check.passed:
                lines.append(_line(f"      {check.path}", "", False, check.reason))
        return lines

    def _gradient_lines(self) -> list[str]:
        if self.gradients is None:
            return []
        failed = [check for check in self.gradients if not check.passed]
        text = f"{len(self.gradients) - len(failed)} of {len(self.gradients)} as near to float64 as eager's"
        lines = [_line("    gradients", text, not failed)]
        for check in failed[:_SHOWN]:
            errors = f"error {check.ours_max:.3g}, eager's {check.eager_max:.3g}"
            lines.append(_line(f"      {check.path}, {check.gradient}", check.reason or errors, False))
        return lines

    def _verdict_lines(self) -> list[str]:
        if self.agrees and self.nothing_ran:
            return [f"  {NOTHING_RAN}"]
        return [_line("equivalent", self._gap_text(), self.passed)]

    def _gap_text(self) -> str:
        missed = self.unreached
        if not missed:
            return ""
        more = f" and {len(missed) - _SHOWN} more" if len(missed) > _SHOWN else ""
        return f"nothing is known of {len(missed)} not reached: {', '.join(missed[:_SHOWN])}{more}"

    def _greedy_text(self) -> str:
        greedy, first = self.greedy, self.greedy.first_difference
        if not greedy.sequences:
            return greedy.reason
        if first is None:
            return f"{greedy.sequences} x {greedy.new_tokens} tokens, all equal"
        kind = "a tie within the noise floor" if first.is_tie else f"noise explains {first.tie_margin:.3g}"
        return (
            f"input {first.index} row {first.row} differs first at new token {first.step}: {first.reference_token} "
            f"became {first.candidate_token}, preferred by {first.margin:.3g} ({kind})"
        )

    def _launch_text(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.launches.items()))
        return counts or "none: the candidate ran in plain torch"


def _line(name: str, text: str, passed: bool | None = None, reason: str = "") -> str:
    verdict = {None: "", True: "PASS", False: "FAIL"}[passed]
    text = ": ".join(part for part in (text, reason) if part)
    return f"  {verdict:4}  {name:<26} : {text}".rstrip(" :")


def plain(value):
    """The value for JSON: names as strings, tuples as lists, and as a string a number that is not finite."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
