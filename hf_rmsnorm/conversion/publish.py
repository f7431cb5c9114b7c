"""The last step before a folder becomes DST: it is judged, and its model card says what was done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .source import ConversionError
from .verify import Verification


class VerificationFailed(ConversionError):
    """The written checkpoint does not compute what the source does; it was not published."""

    def __init__(self, text: str, verification: Verification):
        super().__init__(text)
        self.verification = verification


class Judged:
    """The `check` of a folder that is to become `dst`.

    Args:
        judge: gives the verdict on the folder.
        passed: called with folder and verdict where it passes; adds to the folder.
    """

    def __init__(self, dst, judge: Callable[[Path], Verification], passed: Callable[[Path, Verification], None]):
        self._dst, self._judge, self._passed = dst, judge, passed
        # What stands where DST appeared in a run before this one, which was killed while it cleaned up.
        self.verification = Verification(True, "verified by the run that wrote it")

    def check(self, folder: Path) -> None:
        """
        Raises:
            VerificationFailed: with the verdict.
        """
        self.verification = verdict = self._judge(folder)
        if not verdict.passed:
            raise VerificationFailed(f"{self._dst}: not published, the result fails verification\n{verdict}", verdict)
        self._passed(folder, verdict)


def add_to_card(folder: Path, heading: str, text: str) -> None:
    """Put a section at the end of the model card, instead of one of this heading that is there."""
    card = folder / "README.md"
    before = card.read_text(encoding="utf-8") if card.exists() else ""
    before = before.partition(f"\n{heading}\n")[0].rstrip()
    section = f"{heading}\n\n{text}"
    card.write_text(f"{before}\n\n{section}" if before else section, encoding="utf-8")
