"""The result of a verification: plain records, one verdict, a short table."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from ..paths import compact_paths, fitted
from .checks import Check
from .noise import LogitDifference, NoiseFloor
from .parts import NOT_REACHED

_SHOWN = 6
NOTHING_VERIFIED = "NOTHING VERIFIED"


@dataclass(frozen=True)
class EquivalenceReport:
    """The result of `verify_equivalence`. Printed, the verdict and a short table;
    `to_text(verbose=True)` has it all.

    Each `Check` of a norm, fused layer, gradient or text has a ``path``, ``passed`` and
    a ``text``, and how many values were ``compared`` and are ``differing``.

    Attributes:
        model: class name of the reference.
        dtype, device: of the reference's parameters.
        logits: the candidate's against the reference's.
        noise_floor: the errors of both models against float64.
        norms: a check of each patched or changed norm. If the inputs ran none of them,
            this fails.
        fused: a check of each layer that the candidate fuses, compared with the same
            layer unfused.
        gradients: those of each patched norm and of these layers, where they were asked
            for.
        greedy: whether both generate the same tokens; ``compared`` is how many.
        launches: Triton kernels that the candidate launched, by kernel name; empty if
            none ran.
        nothing_ran: the reason and the cure where no kernel served the candidate, which
            is the reference patched: it was compared with itself.
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
    norms: tuple[Check, ...]
    greedy: Check
    launches: dict[str, int]
    fused: tuple[Check, ...] = ()
    gradients: tuple[Check, ...] = ()
    nothing_ran: str = ""
    numerics: str = ""
    text_positions: tuple[str, ...] = ()
    quantised: dict[str, int] = field(default_factory=dict)

    @property
    def unreached(self) -> tuple[str, ...]:
        """Paths of the norms that the inputs did not run, so that nothing is proven of
        them.
        """
        return tuple(check.path for check in self.norms if check.text == NOT_REACHED)

    @property
    def passed(self) -> bool:
        """Every comparison passed, and a backend ran that could have differed."""
        return self.verdict == "PASS"

    @property
    def verdict(self) -> str:
        """``"PASS"``, ``"FAIL"`` or ``"NOTHING VERIFIED"``."""
        if self._failed():
            return "FAIL"
        return NOTHING_VERIFIED if self.nothing_ran else "PASS"

    @property
    def headline(self) -> str:
        """The verdict and its reason: what failed, or why nothing was verified and the
        cure.
        """
        if failed := self._failed():
            return f"FAIL: {self.noise_floor.reason or ', '.join(failed)}"
        if self.nothing_ran:
            return f"{NOTHING_VERIFIED}: {self.nothing_ran}"
        if not self.unreached:
            return "PASS"
        shown = ", ".join(compact_paths(self.unreached)[:_SHOWN])
        return f"PASS, but the inputs did not reach {len(self.unreached)} of {len(self.norms)} norms: {shown}"

    def _failed(self) -> list[str]:
        return [part.name for part in self._parts() if not part.passed]

    def _parts(self) -> list["_Part"]:
        """The comparisons, in the order of the table."""
        floor = Check("", self.noise_floor.passed, self.noise_floor.text, 1)
        order = "the originals"
        if self.numerics:
            order = f"{self.numerics}'s order of rounding"
        parts = [
            _Part("error to float64", [floor]),
            _Part("norms", self.norms, f"match {order}"),
            _Part("fused layers", self.fused, "match the unfused ones"),
            _Part("gradients", self.gradients, "as accurate as the original's"),
            _Part("generated tokens", [self.greedy]),
        ]
        return [part for part in parts if part.checks]

    def to_dict(self) -> dict:
        """Every field and verdict as plain JSON values; a number that is not finite
        becomes a string.
        """
        data = asdict(self)
        data["noise_floor"]["passed"] = self.noise_floor.passed
        for name in ("passed", "verdict", "headline", "unreached"):
            data[name] = getattr(self, name)
        return plain(data)

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, verbose: bool = False, name: str = "") -> str:
        """The verdict, and a line for each comparison; verbose: with every check.

        Args:
            name: of the model, which is put before the verdict.
        """
        head = f"{name} in {self.dtype}: {self.headline}" if name else self.headline
        size = f"{self.logits.tokens} tokens"
        if not self.logits.vocabulary:
            size = f"{self.logits.tokens} rows of outputs"
        on = f"{self.model}, {self.dtype} on {self.device}, {size}"
        lines = [fitted(head), _line("", "model", on)]
        lines += [_line("", "", note) for note in self._notes()]
        lines.append(_line("", "difference", self._difference()))
        # Nothing passes where no kernel ran, or where the outputs cannot be compared.
        good = "" if self.noise_floor.reason or self.nothing_ran else "PASS"
        for part in self._parts():
            lines += part.lines(verbose, good)
        launches = [f"{count} {name}" for name, count in sorted(self.launches.items())]
        text = ", ".join(launches) or "none: the norms ran in plain PyTorch"
        return "\n".join([*lines, _line("", "Triton kernels", text)])

    def _notes(self) -> list[str]:
        """What the comparison does not show."""
        notes = []
        if self.quantised:
            pairs = self.quantised.items()
            classes = ", ".join(f"{count} {name}" for name, count in pairs)
            notes.append(
                f"{classes}: quantised, so float64 runs call them in their own dtype"
            )
        if self.text_positions:
            where = ", ".join(compact_paths(self.text_positions))
            notes.append(
                f"saw positions of text alone, as inputs have no picture: q/k norms of {where}"
            )
        return notes

    def _difference(self) -> str:
        """How far the outputs of both models are apart."""
        logits = self.logits
        text = f"{logits.max_abs:.3g} at most"
        if not logits.vocabulary:
            return text
        kl = f"KL {logits.kl_mean:.2g} per token"
        return f"{text}, {kl}, same likeliest token for {logits.top1_agreement:.2%}"


@dataclass(frozen=True)
class _Part:
    """Checks of one kind.

    Attributes:
        what: is said of those that pass. "": there is one check, whose text is shown.
    """

    name: str
    checks: Sequence[Check]
    what: str = ""

    @property
    def passed(self) -> bool:
        """None failed, and at least one was reached."""
        reached = any(check.text != NOT_REACHED for check in self.checks)
        return reached and all(check.passed for check in self.checks)

    def lines(self, verbose: bool, good: str) -> list[str]:
        """The lines of the table; `good` marks what passed."""
        if not self.what:
            check = self.checks[0]
            return [_line(_mark(check, good), self.name, check.text)]
        failed = [check for check in self.checks if not check.passed]
        compared = [check for check in self.checks if check.compared or check in failed]
        text = f"{len(compared) - len(failed)} of {len(compared)} {self.what}"
        if differing := sum(check.differing for check in compared):
            values = sum(check.compared for check in compared)
            text += f"; {differing} of {values} values differ"
        if len(compared) < len(self.checks):
            text += f"; {len(self.checks) - len(compared)} not compared"
        lines = [_line(good if self.passed else "FAIL", self.name, text)]
        for check in self.checks if verbose else failed[:_SHOWN]:
            line = f"  {_mark(check, good):4}      {check.path}: {check.text}"
            lines.append(fitted(line, 8))
        return lines


def _mark(check: Check, good: str) -> str:
    """PASS or FAIL, or nothing if nothing was compared."""
    if not check.passed:
        return "FAIL"
    return good if check.compared else ""


def _line(mark: str, what: str, text: str) -> str:
    """A line of the table; what is too long goes on below the text."""
    return fitted(f"  {mark:4}  {what:<18} {text}", 25 if mark else 19).rstrip()


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
