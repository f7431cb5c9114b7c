"""A written result and its source, compared by `verify_equivalence` before
`convert_checkpoint` publishes the result.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ...converted.record import RECORD_KEY, trained_as_rms
from ...ops import use_backend
from ...patching import patched
from ...verification import EquivalenceReport, verify_equivalence
from ...verification.recorded import as_recorded
from ..checkpoint.source import Checkpoint
from ..errors import ConversionError
from ..options import ConversionOptions
from .pair import side_by_side

logger = logging.getLogger(__name__)

CURE = (
    "What to do: if the weights are stored in a narrow dtype, convert a float32 copy, which has room for the change. "
    "Else keep the source, and report this with the figures above. verify=False publishes without this check."
)


@dataclass(frozen=True)
class Verification:
    """The comparison before publication: the verdict, a line for people, and a report
    of the result as it loads, and as RMSNorm.
    """

    passed: bool
    summary: str
    runs: dict[str, EquivalenceReport] = field(default_factory=dict)

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        runs = {name: report.to_dict() for name, report in self.runs.items()}
        return {"passed": self.passed, "summary": self.summary, "runs": runs}

    def __str__(self) -> str:
        lines = [self.summary]
        for name, report in self.runs.items():
            floor = report.noise_floor
            lines.append(f"  {name}: {report.verdict}, {floor.dtype}, {floor.text}")
        if not self.passed:
            lines.append(CURE)
        return "\n".join(lines)


NOT_RUN = Verification(True, "source and result were not run, as asked")


class VerificationFailed(ConversionError):
    """The written checkpoint computes something else than the source; it was not
    published.
    """

    def __init__(self, text: str, verification: Verification):
        super().__init__(text)
        self.verification = verification


def verify_draft(
    source: Checkpoint, draft: Path, options: ConversionOptions
) -> Verification:
    """Compare a draft with its source.

    Both models run in the checkpoint's own dtype: the converted one as it loads and, if
    its config has a record, with the RMSNorms of that. For these each residual weight
    must be centred. Each run is compared with a float64 run of the source, and may have
    1.5 times the source's own error.
    """
    with side_by_side(source, draft, options) as (original, result, inputs, run_on):
        outputs_alone = {"max_new_tokens": 0, "norms": False}
        computed = as_it_computes(original)
        compare = partial(verify_equivalence, computed, result, inputs, **outputs_alone)
        logger.info("verifying: the result as it loads, %s", run_on)
        runs = {"as loaded": compare()}
        summary = f"source and result run {run_on}"
        is_followed = True
        if hasattr(result.config, RECORD_KEY):
            logger.info("verifying: the result as RMSNorm")
            with patched(result) as report, use_backend("reference"):
                runs["as RMSNorm"] = compare()
            count = sum(norm.converted for norm in report.swapped)
            summary = f"{summary}, {count} norms as RMSNorm"
            is_followed = count > 0
    passed = is_followed and all(report.passed for report in runs.values())
    return Verification(passed, f"{summary}: {'PASS' if passed else 'FAIL'}", runs)


def as_it_computes(model):
    """The model; if it was trained as RMSNorm, a model that computes that in plain
    torch.
    """
    if trained_as_rms(getattr(model.config, RECORD_KEY, None)):
        return as_recorded(model)
    return model
