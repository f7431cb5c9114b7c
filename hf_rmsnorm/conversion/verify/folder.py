"""The last step before a folder becomes DST: source and result compared, and the
section of its model card.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers
from huggingface_hub import ModelCardData

from ... import __version__
from ...record import RECORD_KEY, trained_as_rms
from ...verification.recorded import as_recorded
from ..folders import ADAPTER_CONFIG, read_json
from ..plan import ConversionError
from .pair import Running, side_by_side

NOT_RUN = "source and result were not run, as asked"
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

    @classmethod
    def of(cls, runs: dict[str, dict], what: str) -> Verification:
        """That of runs of which none may fail; `what` describes the runs."""
        failed = any(figures["verdict"] == "FAIL" for figures in runs.values())
        return cls(not failed, f"{what}: {'FAIL' if failed else 'PASS'}", runs)

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [self.summary]
        for name, run in self.runs.items():
            figures = (
                f"{what} {v:.4g}" if isinstance(v, float) else f"{what} {v}"
                for what, v in run.items()
            )
            lines.append(f"  {name}: {', '.join(figures)}")
        if self.runs and not self.passed:
            lines.append(CURE)
        return "\n".join(lines)


class VerificationFailed(ConversionError):
    """The written checkpoint does not compute what the source does; it was not
    published.
    """

    def __init__(self, text: str, verification: Verification):
        super().__init__(text)
        self.verification = verification


def verify_folder(src, folder: Path, how: Running) -> Verification:
    """Compare a converted folder with its source.

    Both models run in the checkpoint's own dtype, the converted one as it loads
    (LayerNorm) and as RMSNorm, for which each residual weight must be centred. Each is
    compared with a float64 run of the source, and may have 1.5 times the source's own
    error. If memory does not hold both models, each module's weights are read when it
    runs.
    """
    if not how.verify:
        return Verification(True, NOT_RUN)
    with side_by_side(src, folder, how) as pair:
        return Verification.of(
            pair.compare_both(), f"source and result run {pair.run_on}"
        )


def verify_folders(src, folder: Path, how: Running) -> Verification:
    """Compare two checkpoints of different classes; the second may have 1.5 times the
    error of the first.
    """
    if not how.verify:
        return Verification(True, NOT_RUN)
    with side_by_side(src, folder, how) as pair:
        names = f"{type(pair.source).__name__} and {type(pair.result).__name__}"
        if pair.missing:
            return Verification(
                False,
                f"{type(pair.result).__name__} does not load the result: {pair.missing[0]}",
            )
        pair.source = as_it_computes(pair.source)
        return Verification.of({"result": pair.compare()}, f"{names} run {pair.run_on}")


def as_it_computes(model):
    """The model; if it was trained as RMSNorm, a model that computes that in plain
    torch.
    """
    return (
        as_recorded(model)
        if trained_as_rms(getattr(model.config, RECORD_KEY, None))
        else model
    )


def provenance(src: str | os.PathLike) -> dict[str, str]:
    """The source of a result and the versions that made it, for its config, its shards'
    metadata and its model card.
    """
    return {
        "source": _origin(Path(os.path.realpath(src))),
        "converted_by": f"hf-rmsnorm {__version__}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _origin(folder: Path) -> str:
    """The source of an earlier conversion of a folder; else its name on the hub, or the
    folder's name.
    """
    path = folder / "config.json"
    record = read_json(path).get(RECORD_KEY) if path.is_file() else None
    if isinstance(record, dict) and isinstance(record.get("source"), str):
        return record["source"]
    cached = SNAPSHOT.search(folder.as_posix())
    return (
        f"{cached['id'].replace('--', '/')}@{cached['commit']}"
        if cached
        else folder.name
    )


def add_to_card(
    folder: Path, heading: str, text: str, made: dict[str, str], *proofs: object
) -> None:
    """Put a section at the end of the model card, instead of one of this heading; the
    proofs are set below the text.
    """
    card = folder / "README.md"
    # As bytes and not as text: neither line ends nor bytes that are not UTF-8 change.
    before = (
        card.read_bytes().decode("utf-8", "surrogateescape") if card.exists() else ""
    )
    before = re.sub(
        rf"(?ms)^{re.escape(heading)}[ \r]*\n.*?(?=^## |\Z)", "", before
    ).rstrip()
    by = f"{made['converted_by']}, PyTorch {made['torch']} and Transformers {made['transformers']}"
    if proofs:
        text = "\n".join([f"{text.rstrip()}\n\n```", *map(str, proofs), "```"])
    section = (
        f"{heading}\n\n{text.rstrip()}\n\nMade from `{made['source']}` with {by}.\n"
    )
    card_text = f"{before}\n\n{section}" if before else section
    has_front_matter = re.match(r"\ufeff?\s*---", card_text)
    if not has_front_matter:
        card_text = f"{_front_matter(folder, made['source'])}\n\n{card_text}"
    card.write_bytes(card_text.encode("utf-8", "surrogateescape"))


def _front_matter(folder: Path, source: str) -> str:
    """The front matter by which the hub finds a card that has none."""
    is_adapter = (folder / ADAPTER_CONFIG).exists()
    of_the_hub = re.fullmatch(r"([\w./-]+)@[0-9a-f]+", source)
    data = ModelCardData(
        base_model=of_the_hub and of_the_hub[1],
        library_name="peft" if is_adapter else "transformers",
        tags=["rmsnorm", "hf-rmsnorm"],
    )
    return f"---\n{data.to_yaml()}\n---"
