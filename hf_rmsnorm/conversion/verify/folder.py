"""The last step before a folder becomes DST: source and result compared, and the
section of its model card.
"""

from __future__ import annotations

import logging
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers

from ... import __version__
from ...patching import patched
from ...record import RECORD_KEY, trained_as_rms
from ...verification.float64 import in_float64
from ...verification.noise import noise_floor
from ...verification.recorded import as_recorded
from ...verification.runs import outputs_of
from ..folders import CONFIG, read_json
from ..options import ConversionOptions
from ..plan import ConversionError
from .pair import side_by_side

logger = logging.getLogger(__name__)

CURE = (
    "What to do: if the weights are stored in a narrow dtype, convert a float32 copy, which has room for the change. "
    "Else keep the source, and report this with the figures above. verify=False publishes without this check."
)
# in the cache of the hub
SNAPSHOT = re.compile(r"models--(?P<id>[^/]+)/snapshots/(?P<commit>[^/]+)$")


@dataclass(frozen=True)
class Verification:
    """The comparison before publication: the verdict, a line for people, and the
    figures of each run.
    """

    passed: bool
    summary: str
    runs: dict = field(default_factory=dict)

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [self.summary]
        for name, run in self.runs.items():
            figures = []
            for what, value in run.items():
                shown = f"{value:.4g}" if isinstance(value, float) else value
                figures.append(f"{what} {shown}")
            lines.append(f"  {name}: {', '.join(figures)}")
        if self.runs and not self.passed:
            lines.append(CURE)
        return "\n".join(lines)


NOT_RUN = Verification(True, "source and result were not run, as asked")


class VerificationFailed(ConversionError):
    """The written checkpoint does not compute what the source does; it was not
    published.
    """

    def __init__(self, text: str, verification: Verification):
        super().__init__(text)
        self.verification = verification


def verify_folder(src: Path, folder: Path, options: ConversionOptions) -> Verification:
    """Compare a converted folder with its source.

    Both models run in the checkpoint's own dtype, the converted one as it loads and,
    where its config has a record, with the RMSNorms of that, for which each residual
    weight must be centred. Each is compared with a float64 run of the source, and may
    have 1.5 times the source's own error. If memory does not hold both models, each
    module's weights are read when it runs.
    """
    runs = {}
    with side_by_side(src, folder, options) as pair:
        source = as_it_computes(pair.source)
        logger.info("verifying: the source, %s", pair.run_on)
        own = outputs_of(source, pair.inputs)
        logger.info("verifying: the source in float64")
        with in_float64(source):
            exact = [y.double() for y in outputs_of(source, pair.inputs)]
        logger.info("verifying: the result")
        runs["as loaded"] = _figures(own, outputs_of(pair.result, pair.inputs), exact)
        if hasattr(pair.result.config, RECORD_KEY):
            logger.info("verifying: the result as RMSNorm")
            with patched(pair.result) as report:
                outputs = outputs_of(pair.result, pair.inputs)
            figures = _figures(own, outputs, exact)
            count = sum(record.converted for record in report.swapped)
            figures["norms"] = f"{count} as RMSNorm"
            if count == 0:
                figures["verdict"] = "FAIL"
            runs["as RMSNorm"] = figures
    passed = all(figures["verdict"] == "PASS" for figures in runs.values())
    verdict = "PASS" if passed else "FAIL"
    return Verification(passed, f"source and result run {pair.run_on}: {verdict}", runs)


def _figures(own, outputs, exact) -> dict:
    """Figures of the result's outputs, whose error against float64 is compared with the
    source's own.
    """
    floor = noise_floor(own, outputs, exact)
    figures = {
        "verdict": "PASS" if floor.passed else "FAIL",
        "dtype": floor.dtype,
        "error": floor.candidate_max,
        "source's own error": floor.reference_max,
        "allowed": floor.allowed_max,
        "RMS error": floor.candidate_rms,
    }
    if not floor.passed:
        why = "its error is larger than that of the source allows"
        figures["reason"] = floor.reason or why
    return figures


def as_it_computes(model):
    """The model; if it was trained as RMSNorm, a model that computes that in plain
    torch.
    """
    if trained_as_rms(getattr(model.config, RECORD_KEY, None)):
        return as_recorded(model)
    return model


def provenance(src: Path) -> dict[str, str]:
    """The source of a result and the versions that made it, for its config, its shards'
    metadata and its model card.
    """
    return {
        "source": _origin(src.resolve()),
        "converted_by": f"hf-rmsnorm {__version__}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _origin(folder: Path) -> str:
    """The source of an earlier conversion of a folder; else its name on the hub, or the
    folder's name.
    """
    record = read_json(folder / CONFIG).get(RECORD_KEY) or {}
    if "source" in record:
        return record["source"]
    cached = SNAPSHOT.search(folder.as_posix())
    if cached is None:
        return folder.name
    return f"{cached['id']}@{cached['commit']}".replace("--", "/")


def add_to_card(
    folder: Path, heading: str, text: str, made: dict[str, str], *proofs: object
) -> None:
    """Put a section at the end of the model card, instead of one of this heading; the
    proofs are set below the text.
    """
    card = folder / "README.md"
    # As bytes and not as text: neither line ends nor bytes that are not UTF-8 change.
    before = card.read_bytes() if card.exists() else b""
    old = rf"(?ms)^{re.escape(heading)}[ \r]*\n.*?(?=^## |\Z)"
    before = re.sub(old.encode(), b"", before).rstrip()
    shown = "\n".join(["```", *map(str, proofs), "```"])
    by = "Made from `{source}` with {converted_by}, PyTorch {torch} and Transformers {transformers}."
    section = f"{heading}\n\n{text}\n\n{shown}\n\n{by.format(**made)}\n"
    card.write_bytes(b"\n\n".join(filter(None, (before, section.encode()))))
