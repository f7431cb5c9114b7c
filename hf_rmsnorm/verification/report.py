"""What a verification found: plain records, one verdict, a table."""

import dataclasses
import math
from dataclasses import dataclass, field

from ..paths import fitted
from .checks import NormCheck
from .gradients import GradientCheck
from .layers import LayerCheck
from .noise import LogitDifference, NoiseFloor

_SHOWN = 6
NOTHING_VERIFIED = "NOTHING VERIFIED"


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
        return self.equal or self.first_difference.is_tie

    @property
    def words(self) -> str:
        """What a report says of it."""
        first = self.first_difference
        if not self.sequences:
            return self.reason
        if first is None:
            return f"{self.sequences} x {self.new_tokens} tokens, all equal"
        kind = "a tie within the noise floor" if first.is_tie else f"noise explains {first.tie_margin:.3g}"
        place = f"input {first.index} row {first.row} differs first at new token {first.step}: {first.reference_token}"
        return f"{place} became {first.candidate_token}, preferred by {first.margin:.3g} ({kind})"


@dataclass(frozen=True)
class EquivalenceReport:
    """The outcome of :func:`verify_equivalence`; printed, a verdict with its reason and a table.

    Attributes:
        model: class name of the reference.
        dtype, device: of the reference's parameters.
        logits: candidate against reference.
        noise_floor: verdict (a).
        norms: verdict (b), one record per changed module; None if it was not asked for.
            Those in `unreached` were not run by the inputs; if that is all of them, (b) fails.
        fused: a verdict on each layer that the candidate fuses, against the same layer unfused.
        gradients: of each patched norm and each of those layers; None if they were not asked for.
        nothing_ran: no kernel served the candidate, which is the reference patched: it was compared with itself.
        why_nothing_ran: the reason, and the cure.
        greedy: whether both generate the same tokens.
        launches: Triton kernels that the candidate launched, by kernel name; empty if none ran.
        backend: what `use_backend` was to choose for the candidate; None left the choice in force.
        numerics: whose order of rounding the candidate's norms have, with its version; "" where it is their own.
        quantised: how many modules of each class have quantised weights. Their own arithmetic runs in the float64 run
            too, so it is not judged.
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
    fused: tuple[LayerCheck, ...] = ()
    gradients: tuple[GradientCheck, ...] | None = None
    nothing_ran: bool = False
    numerics: str = ""
    why_nothing_ran: str = ""
    quantised: dict[str, int] = field(default_factory=dict)

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
    def agrees(self) -> bool:
        """All verdicts hold and no greedy token differs beyond a tie, whatever it was that ran."""
        pieces = (*self.fused, *(self.gradients or ()))
        verdicts = (self.noise_floor.passed, self.norms_passed, self.greedy.passed)
        return all(verdicts) and all(piece.passed for piece in pieces)

    @property
    def passed(self) -> bool:
        """As `agrees`, and something ran that could differ."""
        return self.agrees and not self.nothing_ran

    @property
    def verdict(self) -> str:
        """``"PASS"``, ``"FAIL"`` or ``"NOTHING VERIFIED"``."""
        return "PASS" if self.passed else NOTHING_VERIFIED if self.agrees else "FAIL"

    @property
    def headline(self) -> str:
        """The verdict, and what there is to know of it: what failed, or why nothing was verified and the cure."""
        missed = self.unreached
        if self.verdict == NOTHING_VERIFIED:
            why = self.why_nothing_ran or "no kernel ran"
        elif self.verdict == "FAIL":
            why = self.noise_floor.reason or ", ".join(self._failed())
        elif missed:
            more = f" and {len(missed) - _SHOWN} more" if len(missed) > _SHOWN else ""
            why = f"nothing is known of {len(missed)} not reached: {', '.join(missed[:_SHOWN])}{more}"
        else:
            why = ""
        return f"{self.verdict}: {why}" if why else self.verdict

    def _failed(self) -> list[str]:
        verdicts = {
            "(a) errors to float64": self.noise_floor.passed,
            "(b) norm by norm": self.norms_passed,
            "fused layers": all(check.passed for check in self.fused),
            "gradients": all(check.passed for check in self.gradients or ()),
            "greedy generation": self.greedy.passed,
        }
        return [name for name, passed in verdicts.items() if not passed]

    def to_dict(self) -> dict:
        """Every field and verdict as plain JSON values; a number that is not finite becomes a string."""
        data = dataclasses.asdict(self)
        data |= _properties(self, "passed", "verdict", "headline", "norms_passed", "unreached")
        data["noise_floor"] |= _properties(self.noise_floor, "allowed_max", "allowed_rms", "passed")
        data["greedy"] |= _properties(self.greedy, "equal", "passed")
        if self.greedy.first_difference is not None:
            data["greedy"]["first_difference"] |= _properties(self.greedy.first_difference, "is_tie")
        return plain(data)

    def __str__(self) -> str:
        return f"{fitted(self.headline, 4)}\n{self.table}"

    @property
    def table(self) -> str:
        """A line for each comparison, under a head line with the model and the inputs."""
        (_, *head), *rows = self.rows()
        forms = {2: "  {:4}{}", 3: "  {:4}  {:<26} : {}"}
        lines = (forms[len(row)].format(*row).rstrip(" :") for row in rows)
        return fitted("\n".join([": ".join(head), *lines]), 35)

    def rows(self) -> list[tuple[str, ...]]:
        """(PASS, FAIL or nothing; the comparison; its result) of each line of the table.

        Nothing passes where no kernel ran, or where the outputs cannot be compared.
        """
        rows = [*self._output_lines(), *self._norm_lines(), *self._piece_lines(), *self._other_lines()]
        if self.noise_floor.reason or self.nothing_ran:
            rows = [("" if verdict == "PASS" else verdict, *rest) for verdict, *rest in rows]
        return rows

    def _output_lines(self) -> list[tuple[str, ...]]:
        logits, floor = self.logits, self.noise_floor
        errors = "reference {:.3g}, candidate {:.3g}, allowed {:.3g}"
        largest = errors.format(floor.reference_max, floor.candidate_max, floor.allowed_max)
        rms = errors.format(floor.reference_rms, floor.candidate_rms, floor.allowed_rms)
        if floor.reason:
            largest = rms = "not to be measured"
        kl = f"KL per token {logits.kl_mean:.2g} (max {logits.kl_max:.2g})"
        means = f"max {logits.max_abs:.3g}, mean {logits.mean_abs:.3g}"
        size, what, difference = f"{logits.tokens} rows of its outputs", "outputs", means
        if logits.vocabulary:
            size, what = f"{logits.tokens} tokens, vocabulary {logits.vocabulary}", "logits"
            difference = f"{means}, {kl}, top-1 equal {logits.top1_agreement:.2%}"
        comparable = not floor.reason
        lines = [
            _line(f"{self.model}, {self.dtype} on {self.device}", size),
            _line(f"{what} against reference", difference),
            _line("(a) max error to float64", largest, floor.max_passed and comparable, floor.reason),
            _line("    RMS error to float64", rms, floor.rms_passed and comparable),
        ]
        if self.quantised:
            classes = ", ".join(f"{count} {name}" for name, count in self.quantised.items())
            lines.append(_line("    not in float64", f"{classes}: quantised, run in their own dtype in every run"))
        return lines

    def _piece_lines(self) -> list[tuple[str, ...]]:
        lines = []
        if self.fused:
            failed = sorted((check for check in self.fused if not check.passed), key=lambda check: -check.differing)
            reasons = [(check.path, check.reason) for check in failed]
            equal = sum(not check.differing for check in self.fused)
            lines += _section(
                "    fused layers", self.fused, f"agree with the unfused ones, {equal} bit by bit", reasons
            )
        if self.gradients is not None:
            failed = {f"{c.path}, {c.gradient}": c for c in self.gradients if not c.passed}
            errors = "error {0.ours_max:.3g}, eager's {0.eager_max:.3g}"
            reasons = [(name, check.reason or errors.format(check)) for name, check in failed.items()]
            lines += _section("    gradients", self.gradients, "as near to float64 as eager's", reasons)
        return lines

    def _other_lines(self) -> list[tuple[str, ...]]:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.launches.items()))
        return [
            _line("greedy generation", self.greedy.words, self.greedy.passed if self.greedy.sequences else None),
            _line("Triton kernels launched", counts or "none: the candidate ran in plain torch"),
        ]

    @property
    def _originals(self) -> str:
        return f"{self.numerics}'s order of rounding" if self.numerics else "their originals"

    def _norm_lines(self) -> list[tuple[str, ...]]:
        if self.norms is None:
            return [_line("(b) norm by norm", "not asked for")]
        if not self.norms:
            return [_line("(b) norm by norm", "no leaf module differs between reference and candidate", True)]
        compared = [norm for norm in self.norms if norm.elements or not norm.passed]
        good = sum(norm.passed for norm in compared)
        others = f", {len(self.norms) - len(compared)} not compared" if len(compared) < len(self.norms) else ""
        text = f"{good} of {len(compared)} agree with {self._originals}{others}"
        lines = [_line("(b) norm by norm", text, self.norms_passed)]
        worst = sorted(self.norms, key=lambda n: (n.passed, not n.reason, -n.off, -n.worst_ulp))
        for norm in worst[:_SHOWN]:
            off = f"{norm.off} of {norm.elements} off ({norm.allowed} allowed)"
            text = f"{norm.dtype}, {off}, max {norm.worst_ulp:.2g} ulp" if norm.elements else ""
            lines.append(_line(f"    {norm.path}", text, norm.passed if norm in compared else None, norm.reason))
        if len(self.norms) > _SHOWN:
            lines.append(("", f"... and {len(self.norms) - _SHOWN} that do no worse"))
        return lines


def _properties(record, *names: str) -> dict:
    return {name: getattr(record, name) for name in names}


def _section(name: str, checks: tuple, what: str, failed: list[tuple[str, str]]) -> list[tuple[str, ...]]:
    """How many checks passed, and of the first that did not which and why."""
    count = f"{len(checks) - len(failed)} of {len(checks)} {what}"
    return [_line(name, count, not failed), *(_line(f"    {path}", why, False) for path, why in failed[:_SHOWN])]


def _line(name: str, text: str, passed: bool | None = None, reason: str = "") -> tuple[str, ...]:
    verdict = {None: "", True: "PASS", False: "FAIL"}[passed]
    return verdict, name, ": ".join(part for part in (text, reason) if part)


def plain(value):
    """The value for JSON: names as strings, tuples as lists, and as a string a number that is not finite."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
