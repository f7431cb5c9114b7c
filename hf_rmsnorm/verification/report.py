"""The result of a verification: plain records, one verdict, a short table."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..paths import compact_paths, fitted
from .checks import NormCheck
from .gradients import GradientCheck
from .layers import LayerCheck
from .noise import LogitDifference, NoiseFloor

_SHOWN = 6
_ERROR, _NORMS, _LAYERS, _GRADIENTS, _TEXT = (
    "error to float64", "norms", "fused layers", "gradients", "generated tokens"
)  # fmt: skip
NOTHING_VERIFIED = "NOTHING VERIFIED"


@dataclass(frozen=True)
class GreedyDifference:
    """Where greedy generation first differs: in prompt ``row`` of input ``index``, at
    new token ``step`` (from 0).

    ``margin``: by how much the original's logits prefer its token. Up to
    ``tie_margin``, which the errors of both models against float64 explain, the two
    tokens are a tie.
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
    """Greedy generation by both models: passed if all tokens are equal up to a tie.

    ``sequences`` prompts were continued, the longest by ``new_tokens`` tokens; both are
    0 where nothing was generated, for the ``reason``.
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
        """The line of a report."""
        first = self.first_difference
        if not self.sequences:
            return self.reason
        if first is None:
            return f"{self.sequences} x {self.new_tokens} tokens, all equal"
        kind = (
            "a tie, as rounding explains that"
            if first.is_tie
            else f"rounding explains {first.tie_margin:.3g}"
        )
        place = f"input {first.index} row {first.row}, new token {first.step}"
        tokens = f"{first.candidate_token} instead of {first.reference_token}"
        return f"{place}: {tokens}, whose logit leads by {first.margin:.3g} ({kind})"


@dataclass(frozen=True)
class EquivalenceReport:
    """The result of `verify_equivalence`. Printed, the verdict and a short table;
    `to_text(verbose=True)` has it all.

    Attributes:
        model: class name of the reference.
        dtype, device: of the reference's parameters.
        logits: the candidate's against the reference's.
        noise_floor: the errors of both models against float64.
        norms: a record for each changed module; None if they were not asked for. If the
            inputs ran none of them, this fails.
        fused: a record for each layer that the candidate fuses, compared with the same
            layer unfused.
        gradients: those of each patched norm and of these layers; None if they were not
            asked for.
        nothing_ran: no kernel served the candidate, which is the reference patched: it
            was compared with itself.
        why_nothing_ran: the reason, and the cure.
        greedy: whether both generate the same tokens.
        launches: Triton kernels that the candidate launched, by kernel name; empty if
            none ran.
        backend: what `use_backend` chose for the candidate; None left the choice in
            force.
        numerics: the server whose order of rounding the candidate's norms have, with
            its version; "" if none.
        text_positions: fused q/k norms of a model with positions of three axes that ran
            on text alone.
        quantised: how many modules of each class have quantised weights. The float64
            run calls these in their own dtype, so their arithmetic is not judged.
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
    text_positions: tuple[str, ...] = ()
    quantised: dict[str, int] = field(default_factory=dict)

    @property
    def norms_passed(self) -> bool:
        """No norm failed, and the inputs reached at least one of those that were to be
        checked.
        """
        norms = self.norms or ()
        return all(norm.passed for norm in norms) and (
            not norms or any(norm.reached for norm in norms)
        )

    @property
    def unreached(self) -> tuple[str, ...]:
        """Paths of the norms that the inputs did not run, so that nothing is proven of
        them.
        """
        return tuple(norm.path for norm in self.norms or () if not norm.reached)

    @property
    def agrees(self) -> bool:
        """Every comparison passed, whatever backend ran."""
        pieces = (*self.fused, *(self.gradients or ()))
        verdicts = (self.noise_floor.passed, self.norms_passed, self.greedy.passed)
        return all(verdicts) and all(piece.passed for piece in pieces)

    @property
    def passed(self) -> bool:
        """Every comparison passed, and a backend ran that could have differed."""
        return self.agrees and not self.nothing_ran

    @property
    def verdict(self) -> str:
        """``"PASS"``, ``"FAIL"`` or ``"NOTHING VERIFIED"``."""
        if self.passed:
            return "PASS"
        return NOTHING_VERIFIED if self.agrees else "FAIL"

    @property
    def headline(self) -> str:
        """The verdict and its reason: what failed, or why nothing was verified and the
        cure.
        """
        if self.verdict == NOTHING_VERIFIED:
            return f"{NOTHING_VERIFIED}: {self.why_nothing_ran or 'no kernel ran'}"
        if self.verdict == "FAIL":
            return f"FAIL: {self.noise_floor.reason or ', '.join(self._failed())}"
        if not self.unreached:
            return "PASS"
        shown = ", ".join(compact_paths(self.unreached)[:_SHOWN])
        return f"PASS, but the inputs did not reach {len(self.unreached)} of {len(self.norms)} norms: {shown}"

    def _failed(self) -> list[str]:
        verdicts = {
            _ERROR: self.noise_floor.passed,
            _NORMS: self.norms_passed,
            _LAYERS: all(check.passed for check in self.fused),
            _GRADIENTS: all(check.passed for check in self.gradients or ()),
            _TEXT: self.greedy.passed,
        }
        return [name for name, passed in verdicts.items() if not passed]

    def to_dict(self) -> dict:
        """Every field and verdict as plain JSON values; a number that is not finite
        becomes a string.
        """
        data = dataclasses.asdict(self)
        data |= _properties(
            self, "passed", "verdict", "headline", "norms_passed", "unreached"
        )
        data["noise_floor"] |= _properties(
            self.noise_floor, "allowed_max", "allowed_rms", "passed"
        )
        data["greedy"] |= _properties(self.greedy, "equal", "passed")
        if self.greedy.first_difference is not None:
            data["greedy"]["first_difference"] |= _properties(
                self.greedy.first_difference, "is_tie"
            )
        return plain(data)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, verbose: bool = False, name: str = "") -> str:
        """The verdict, and a line for each comparison; verbose: with every number and
        every norm.

        Args:
            name: of the model, which is put before the verdict.
        """
        head = f"{name} in {self.dtype}: {self.headline}" if name else self.headline
        lines = [_line(*row) for row in self.rows(verbose)]
        return "\n".join([fitted(head), *lines])

    def rows(self, verbose: bool = False) -> list[tuple[str, str, str]]:
        """(PASS, FAIL or nothing; the comparison; its result) for each line of the
        text.

        Nothing passes where no kernel ran, or where the outputs cannot be compared.
        """
        rows = [
            *self._output_rows(verbose),
            *self._norm_rows(verbose),
            *self._piece_rows(),
            *self._other_rows(verbose),
        ]
        if self.noise_floor.reason or self.nothing_ran:
            rows = [("" if mark == "PASS" else mark, *rest) for mark, *rest in rows]
        return rows

    def _output_rows(self, verbose: bool) -> Iterator[tuple[str, str, str]]:
        logits, floor = self.logits, self.noise_floor
        size = (
            f"{logits.tokens} tokens"
            if logits.vocabulary
            else f"{logits.tokens} rows of outputs"
        )
        yield _row("model", f"{self.model}, {self.dtype} on {self.device}, {size}")
        if self.quantised:
            classes = ", ".join(
                f"{count} {name}" for name, count in self.quantised.items()
            )
            yield _row(
                "",
                f"{classes}: quantised, so float64 runs call them in their own dtype",
            )
        if floor.reason:
            yield _row(_ERROR, "not measured", False)
        else:
            largest = _errors(
                floor.candidate_max, floor.reference_max, floor.allowed_max
            )
            yield _row(_ERROR, largest, floor.max_passed)
        rms = _errors(floor.candidate_rms, floor.reference_rms, floor.allowed_rms)
        if not floor.reason and (verbose or not floor.rms_passed):
            yield _row("    RMS", rms, floor.rms_passed)
        if verbose:
            yield _row("logits" if logits.vocabulary else "outputs", self._difference())

    def _difference(self) -> str:
        """How far the outputs of both models are apart."""
        logits = self.logits
        text = f"largest difference {logits.max_abs:.3g}, mean {logits.mean_abs:.3g}"
        if not logits.vocabulary:
            return text
        kl = f"KL per token {logits.kl_mean:.2g} (largest {logits.kl_max:.2g})"
        return f"{text}, {kl}, same likeliest token for {logits.top1_agreement:.2%}"

    def _norm_rows(self, verbose: bool) -> Iterator[tuple[str, str, str]]:
        if self.norms is None:
            return
        if not self.norms:
            yield _row(_NORMS, "no module differs between the two models", True)
            return
        yield _row(_NORMS, self._norms_in_total(), self.norms_passed)
        worst = sorted(
            self.norms,
            key=lambda norm: (norm.passed, not norm.reason, -norm.off, -norm.worst_ulp),
        )
        failed = [norm for norm in worst if not norm.passed]
        for norm in worst if verbose else failed[:_SHOWN]:
            yield _row(
                f"    {norm.path}",
                norm.words,
                norm.passed if norm.was_compared else None,
            )

    def _norms_in_total(self) -> str:
        compared = [norm for norm in self.norms if norm.was_compared]
        good = sum(norm.passed for norm in compared)
        originals = (
            f"{self.numerics}'s order of rounding" if self.numerics else "the originals"
        )
        parts = [f"{good} of {len(compared)} match {originals}"]
        if compared:
            parts.append(_total(compared))
        if len(compared) < len(self.norms):
            parts.append(f"{len(self.norms) - len(compared)} not compared")
        return "; ".join(parts)

    def _piece_rows(self) -> Iterator[tuple[str, str, str]]:
        if self.fused:
            failed = sorted(
                (check for check in self.fused if not check.passed),
                key=lambda check: -check.differing,
            )
            equal = sum(not check.differing for check in self.fused)
            reasons = [(check.path, check.reason) for check in failed]
            yield from _section(
                _LAYERS,
                self.fused,
                f"match the unfused ones, {equal} bit for bit",
                reasons,
            )
        if self.text_positions:
            where = ", ".join(compact_paths(list(self.text_positions)))
            yield _row(
                "",
                f"saw positions of text alone, as inputs have no picture: q/k norms of {where}",
            )
        if self.gradients is not None:
            failed = [check for check in self.gradients if not check.passed]
            reasons = [
                (f"{check.path}, {check.gradient}", check.words) for check in failed
            ]
            yield from _section(
                _GRADIENTS, self.gradients, "as accurate as the original's", reasons
            )

    def _other_rows(self, verbose: bool) -> Iterator[tuple[str, str, str]]:
        yield _row(
            _TEXT,
            self.greedy.words,
            self.greedy.passed if self.greedy.sequences else None,
        )
        counts = ", ".join(
            f"{count} {name}" for name, count in sorted(self.launches.items())
        )
        launches = (
            f"{sum(self.launches.values())} launches"
            if counts
            else "none: the norms ran in plain PyTorch"
        )
        yield _row("Triton kernels", counts if verbose and counts else launches)


def _properties(record, *names: str) -> dict:
    return {name: getattr(record, name) for name in names}


def _total(norms: list[NormCheck]) -> str:
    """How many values of all norms differ."""
    differing = sum(norm.differing for norm in norms)
    text = f"{differing} of {sum(norm.elements for norm in norms)} values differ"
    if not differing:
        return text
    return (
        f"{text}, by {max(norm.worst_ulp for norm in norms):.2g} rounding steps at most"
    )


def _errors(patched: float, original: float, limit: float) -> str:
    return f"patched {patched:.3g}, original {original:.3g} (limit {limit:.3g})"


def _section(
    name: str, checks: tuple, what: str, failed: list[tuple[str, str]]
) -> list[tuple[str, str, str]]:
    """How many checks passed; and the path and the reason of the first that did not."""
    count = f"{len(checks) - len(failed)} of {len(checks)} {what}"
    return [
        _row(name, count, not failed),
        *(_row(f"    {path}", why, False) for path, why in failed[:_SHOWN]),
    ]


def _line(mark: str, what: str, text: str) -> str:
    """A row as it is printed; what belongs to the row above is indented."""
    if what.startswith(" "):
        return fitted(f"  {mark:4}  {what}: {text}", 8)
    return fitted(f"  {mark:4}  {what:<18} {text}", 25 if mark else 19).rstrip()


def _row(what: str, text: str, passed: bool | None = None) -> tuple[str, str, str]:
    return {None: "", True: "PASS", False: "FAIL"}[passed], what, text


def plain(value):
    """The value for JSON: names as strings, tuples as lists, and as a string a number
    that is not finite.
    """
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
