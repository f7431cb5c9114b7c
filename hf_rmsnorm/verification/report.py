"""The result of a verification: plain records, one verdict, a short table."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from ..paths import compact_paths, fitted
from .checks import Check, worst
from .noise import NoiseFloor
from .parts import NOT_REACHED

_SHOWN = 6
NOTHING_VERIFIED = "NOTHING VERIFIED"


@dataclass(frozen=True)
class EquivalenceReport:
    """The result of `verify_equivalence`. Printed, the verdict and a short table;
    `to_text(verbose=True)` has it all.

    Each `Check` of a norm, fused layer, gradient or text has a ``path``, ``passed`` and
    a ``text``. ``compared`` and ``differing`` count values.

    Attributes:
        model: class name of the reference.
        dtype, device: of the reference's parameters.
        noise_floor: the errors of both models' outputs against float64.
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
        quantised: how many modules of each class have quantised weights. The float64
            run calls these in their own dtype, so their arithmetic is not judged.
    """

    model: str
    dtype: str
    device: str
    noise_floor: NoiseFloor
    norms: tuple[Check, ...]
    greedy: Check
    launches: dict[str, int]
    fused: tuple[Check, ...] = ()
    gradients: tuple[Check, ...] = ()
    nothing_ran: str = ""
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
        reason = self.nothing_ran
        if failed := self._failed():
            reason = self.noise_floor.reason or ", ".join(failed)
        if reason:
            return f"{self.verdict}: {reason}"
        if not self.unreached:
            return self.verdict
        shown = ", ".join(compact_paths(self.unreached)[:_SHOWN])
        count = f"{len(self.unreached)} of {len(self.norms)}"
        return f"PASS, but the inputs did not reach {count} norms: {shown}"

    def _failed(self) -> list[str]:
        return [part.name for part in self._parts() if part.failed]

    def _parts(self) -> list["_Part"]:
        """The comparisons, in the order of the table."""
        floor = Check("", self.noise_floor.passed, self.noise_floor.text, 1)
        parts = [
            _Part("error to float64", [floor]),
            _Part("norms", self.norms, "match the originals"),
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

    def to_text(self, verbose: bool = False) -> str:
        """The verdict, and a line for each comparison; verbose: with every check."""
        floor = self.noise_floor
        on = (
            f"{self.model}, {self.dtype} on {self.device}, {floor.rows} rows of outputs"
        )
        rows = [("", "model", on)]
        if self.quantised:
            how = "quantised, so float64 runs call them in their own dtype"
            rows.append(("", "", f"{_counts(self.quantised)}: {how}"))
        rows.append(("", "difference", f"{floor.difference:.3g} at most"))
        # nothing passes where no kernel ran, or where the outputs cannot be compared
        nothing_passes = bool(floor.reason or self.nothing_ran)
        for part in self._parts():
            if part.failed or not nothing_passes:
                rows += part.rows(verbose)
        launches = _counts(self.launches) or "none: the norms ran in plain PyTorch"
        rows.append(("", "Triton kernels", launches))
        lines = [fitted(self.headline)]
        for mark, what, text in rows:
            # a long text continues below its start
            line = f"  {mark:4}  {what:<18} {text}"
            lines.append(fitted(line, 25 if mark else 19))
        return "\n".join(lines)


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
    def failed(self) -> bool:
        """Whether a check failed, or none was reached."""
        check = worst(self.checks)
        return not check.passed or check.text == NOT_REACHED

    def rows(self, verbose: bool) -> list[tuple[str, str, str]]:
        """The rows of the table: the result, and the checks that failed, or all."""
        check = worst(self.checks)
        mark = "FAIL" if self.failed else check.mark
        if not self.what:
            return [(mark, self.name, check.text)]
        good = differing = compared = 0
        bad = []
        for check in self.checks:
            good += check.mark == "PASS"
            differing += check.differing
            compared += check.compared
            if not check.passed:
                bad.append(check)
        text = f"{good} of {len(self.checks)} {self.what}"
        if differing:
            text += f"; {differing} of {compared} values differ"
            text += "" if bad else " by rounding"
        rows = [(mark, self.name, text)]
        for check in self.checks if verbose else bad[:_SHOWN]:
            rows.append((check.mark, f"    {check.path}:", check.text))
        return rows


def _counts(counts: dict[str, int]) -> str:
    """How many there are of each."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def plain(data: dict) -> dict:
    """The data as JSON has it: tuples as lists, and as a string a number that is not
    finite.
    """
    return json.loads(json.dumps(data), parse_constant=str)
