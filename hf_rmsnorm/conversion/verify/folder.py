"""The last step before a folder becomes DST: source and result side by side, and what the model card says of it."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import transformers
import yaml
from huggingface_hub import ModelCardData

from ... import __version__
from ...record import RECORD_KEY, is_centred, shorten, trained_as_rms
from ...verification.recorded import as_recorded
from ...verification.tolerance import FACTOR
from ..checkpoint.source import open_checkpoint
from ..folders import ADAPTER_CONFIG, read_json
from ..plan import Centre, CentringPlan, ConversionError, rms_norms
from ..proxy.run import and_more
from ..tensors import one_thread
from .pair import ModelPair, Running, side_by_side

logger = logging.getLogger(__name__)

MEAN_DRIFT = "rounding moves the mean of the stream, and what reads this norm would multiply that"
NOT_RUN = "source and result were not run, as asked"
CURE = (
    "What to do: if the weights are stored in a narrow dtype, convert a float32 copy, which has room for the change. "
    "Else keep the source, and report this with the figures above. verify=False publishes without this check."
)
FRONT_MATTER = re.compile(r"(?s)(\ufeff?\s*---[ \t]*\r?\n)(.*?)(?=(?m:^)---[ \t]*(?:\r?\n|$))")
SNAPSHOT = re.compile(r"models--(?P<id>[^/]+)/snapshots/(?P<commit>[^/]+)$")  # in the cache of the hub


@dataclass(frozen=True)
class Verification:
    """What was compared before publication: the verdict, a line for people, and the figures of each run."""

    passed: bool
    summary: str
    runs: dict = field(default_factory=dict)

    @classmethod
    def of(cls, runs: dict[str, dict], what: str) -> Verification:
        """That of runs of which none may fail; `what` says what was run."""
        verdict = "FAIL" if any(figures["verdict"] == "FAIL" for figures in runs.values()) else "PASS"
        return cls(verdict == "PASS", f"{what}: {verdict}", runs)

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [self.summary]
        for name, run in self.runs.items():
            figures = (f"{what} {v:.4g}" if isinstance(v, float) else f"{what} {v}" for what, v in run.items())
            lines.append(f"  {name}: {', '.join(figures)}")
        if self.runs and not self.passed:
            lines.append(CURE)
        return "\n".join(lines)


class VerificationFailed(ConversionError):
    """The written checkpoint does not compute what the source does; it was not published."""

    def __init__(self, text: str, verification: Verification):
        super().__init__(text)
        self.verification = verification


def verify_folder(src, folder: Path, plan: CentringPlan, how: Running) -> tuple[Verification, CentringPlan]:
    """Judge a converted folder against its source.

    First every centred tensor is read again, one at a time. Then, if `how.verify`, both models run in the
    checkpoint's own dtype, the converted one as it loads (LayerNorm) and as RMSNorm; each is compared with a float64
    run of the source, allowed 1.5 times the source's own error (`verify_equivalence`). Where memory does not hold
    both, each module's weights are read from the shards when it runs.

    Rounding moves the mean of a deep stream; a LayerNorm takes that off again. Where the error as RMSNorm is above 1.5
    times that of the same weights as LayerNorm, the last norm stays a LayerNorm if that cures it: config.json in
    `folder` then says so, and the plan that is returned.
    """
    if wrong := not_centred(folder, plan):
        return Verification(False, wrong), plan
    tensors = f"{len(plan.centre)} changed tensors checked on disk"
    if not how.verify:
        return Verification(True, f"{tensors}; {NOT_RUN}"), plan
    with side_by_side(src, folder, how) as pair:
        runs, plan = _compare(pair, folder, plan)
        summary = f"{tensors}; source and result run {pair.run_on}"
    return Verification.of(runs, summary), plan


def verify_folders(src, folder: Path, how: Running) -> Verification:
    """Judge the second of two checkpoints, of whatever classes, by the noise floor of the first."""
    if not how.verify:
        return Verification(True, NOT_RUN)
    with side_by_side(src, folder, how) as pair:
        names = f"{type(pair.source).__name__} and {type(pair.result).__name__}"
        if pair.missing:
            return Verification(False, f"{type(pair.result).__name__} does not load what was made: {pair.missing[0]}")
        pair.source = as_it_computes(pair.source)
        return Verification.of({"result": pair.compare()[0]}, f"{names} run {pair.run_on}")


def as_it_computes(model):
    """The model, or what `patch_model` makes of it where it was trained as RMSNorm, in plain torch."""
    return as_recorded(model) if trained_as_rms(getattr(model.config, RECORD_KEY, None)) else model


def _compare(pair: ModelPair, folder: Path, plan: CentringPlan) -> tuple[dict, CentringPlan]:
    """Figures by name of the run, and the plan with the norm that has to stay."""
    stock, stock_floor = pair.compare()
    logger.info("verifying: result as RMSNorm")
    rms, floor = pair.compare_as_rms()
    runs = {"as LayerNorm": stock, "as RMSNorm": rms}
    bound = FACTOR * stock_floor.candidate_rms + stock_floor.rms_slack
    last = pair.last_of([norm.path for norm in plan.norms if norm.becomes_rms])
    if floor.candidate_rms <= bound or last is None:
        return runs, plan
    norms = tuple(replace(n, becomes_rms=False, reason=MEAN_DRIFT) if n.path == last else n for n in plan.norms)
    record = {**plan.config[RECORD_KEY], "rms_norms": shorten(rms_norms(norms), [n.path for n in norms])}
    kept = replace(plan, norms=norms, config={**plan.config, RECORD_KEY: record})
    setattr(pair.result.config, RECORD_KEY, record)
    cured, cured_floor = pair.compare_as_rms()
    if cured_floor.candidate_rms > bound:
        rms["more than as LayerNorm"] = "rounding moves the stream's mean, and keeping the last norm does not cure it"
        return runs, plan
    config = {**read_json(folder / "config.json"), RECORD_KEY: record}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    cured[f"{last} as RMSNorm too"] = f"RMS error {floor.candidate_rms:.4g}, so it stays LayerNorm"
    return {"as LayerNorm": stock, "as RMSNorm": cured}, kept


def not_centred(folder: Path, plan: CentringPlan) -> str:
    """Which tensors the files of a folder do not hold as the plan says, or ""; one is in memory at a time."""
    made = open_checkpoint(folder, adapter=(folder / ADAPTER_CONFIG).is_file())
    wanted: dict[str, Centre] = {centre.key: centre for centre in plan.centre}
    with one_thread():
        wrong = [
            key
            for key, how in wanted.items()
            if key not in made.tensors or not is_centred(made.read(key), how.axis, how.block, how.blocks)
        ]
    return f"not centred as the plan says: {and_more(sorted(wrong))}" if wrong else ""


def provenance(src: str | os.PathLike) -> dict[str, str]:
    """Where a result comes from and what made it, for its config, its shards' metadata and its model card."""
    return {
        "source": _origin(Path(os.path.realpath(src))),
        "converted_by": f"hf-rmsnorm {__version__}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _origin(folder: Path) -> str:
    """What a folder was first converted from; its name on the hub, or its own, where it is no conversion."""
    path = folder / "config.json"
    record = read_json(path).get(RECORD_KEY) if path.is_file() else None
    if isinstance(record, dict) and isinstance(record.get("source"), str):
        return record["source"]
    cached = SNAPSHOT.search(folder.as_posix())
    return f"{cached['id'].replace('--', '/')}@{cached['commit']}" if cached else folder.name


def add_to_card(folder: Path, heading: str, text: str, made: dict[str, str], *proofs: object) -> None:
    """Put a section at the end of the model card, instead of one of this heading; the proofs are set below the text."""
    card = folder / "README.md"
    # As bytes and not as text: neither line ends nor what is no UTF-8 changes.
    before = card.read_bytes().decode("utf-8", "surrogateescape") if card.exists() else ""
    before = re.sub(rf"(?ms)^{re.escape(heading)}[ \r]*\n.*?(?=^## |\Z)", "", before).rstrip()
    by = f"{made['converted_by']}, PyTorch {made['torch']} and Transformers {made['transformers']}"
    if proofs:
        text = "\n".join([f"{text.rstrip()}\n\n```", *map(str, proofs), "```"])
    section = f"{heading}\n\n{text.rstrip()}\n\nMade from `{made['source']}` with {by}.\n"
    library = "peft" if (folder / "adapter_config.json").exists() else "transformers"
    described = _described(f"{before}\n\n{section}" if before else section, made["source"], library)
    card.write_bytes(described.encode("utf-8", "surrogateescape"))


def _described(text: str, source: str, library: str) -> str:
    """A card with what the hub searches for in its front matter, where that says nothing else of it."""
    named = re.fullmatch(r"([\w./-]+)@[0-9a-f]+", source)  # a folder's name is no model of the hub
    data = ModelCardData(base_model=named and named[1], library_name=library, tags=["rmsnorm", "hf-rmsnorm"])
    found = FRONT_MATTER.match(text)
    try:
        there = yaml.safe_load(found[2]) if found else None
    except yaml.YAMLError:
        return text
    if not isinstance(there, dict):
        return f"---\n{data.to_yaml()}\n---\n\n{text}"
    end = "\r\n" if found[1].endswith("\r\n") else "\n"
    more = "".join(yaml.safe_dump({k: v}) for k, v in data.to_dict().items() if k not in there)
    return text[: found.end(2)] + more.replace("\n", end) + text[found.end(2) :]
