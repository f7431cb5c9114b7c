"""A converted post-norm model as a folder: small enough to be held in memory, staged and published like any other."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from ....record import RECORD_KEY
from ....verification.context import max_positions
from ...checkpoint.files import copy_others
from ...checkpoint.source import Source, open_source
from ...checkpoint.staging import clear_errors, destination, staging_for
from ...checkpoint.stream import run_check
from ...judge.folder import Verification
from ...judge.pair import side_by_side, tokenizer_of
from ...judge.publish import Judged, add_to_card, provenance
from ...plan import ConversionRefused
from ...twin.twin import config_and_class, quiet
from .convert import HELD_OUT, PostNormConversion, PostNormReport, exact_post_norm, fit_post_norm

LEVELS = ("exact", "fit")
SENTENCES = 256
VERIFIED = 4  # of the texts, where there are no prompts
TOKENS = 64
CARD_HEADING = "## Post-norm model with RMSNorms"
CARD_TEXTS = {
    "exact": """Two more neurons in every FFN take the mean off its skip: the FFN norms and the embedding norm may run
as RMSNorm with the original's outputs, the others stay LayerNorm.""",
    "fit": """**Approximate.** What is linear in the input of each norm's writer was taken off by least squares on
text, without training. With its LayerNorms the result gives the original's outputs; as RMSNorm it is near them, as
measured below.""",
}


@dataclass(frozen=True)
class PlannedPostNorm:
    """A converted model in memory, and the folder it was made of."""

    source: Source
    conversion: PostNormConversion

    @property
    def report(self) -> PostNormReport:
        """What was done and measured."""
        return self.conversion.report

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {"report": self.report.to_dict()}

    def __str__(self) -> str:
        return str(self.report)


@dataclass(frozen=True)
class PostNormCheckpoint:
    """What `convert_post_norm` did."""

    dst: Path
    planned: PlannedPostNorm
    verification: Verification

    @property
    def report(self) -> PostNormReport:
        """What was done and measured."""
        return self.planned.report

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        not_copied = list(self.planned.source.not_copied)
        done = {"dst": str(self.dst), "not_copied": not_copied, "verification": self.verification.to_dict()}
        return {**self.planned.to_dict(), **done}

    def __str__(self) -> str:
        lines = [f"{self.dst}: {len(self.planned.conversion.tensors)} tensors"]
        if self.planned.source.not_copied:
            lines.append(f"not copied, as they hold the old weights: {', '.join(self.planned.source.not_copied)}")
        return "\n".join([*lines, str(self.verification)])


def plan_post_norm(
    src: str | os.PathLike,
    level: str,
    *,
    trust_remote_code: bool = False,
    model_class=None,
    texts: list[str] | None = None,
    allow_pickle: bool = False,
) -> PlannedPostNorm:
    """Convert a post-norm model in memory; nothing is written.

    Args:
        src, trust_remote_code, model_class, allow_pickle: as in `convert_checkpoint`.
        level, texts: as in `convert_post_norm`.

    Raises:
        ConversionRefused: the model has not the form that the level needs; the message says what is missing.
        ConversionError: this is no whole checkpoint folder.
    """
    if level not in LEVELS:
        raise ConversionRefused(f"post_norm={level!r}: choose one of {', '.join(LEVELS)}, or refuse")
    with clear_errors(Path(src)):
        source = open_source(src, allow_pickle=allow_pickle)
    config, cls = config_and_class(src, trust_remote_code, model_class)
    how = {"dtype": "auto", "trust_remote_code": bool(trust_remote_code), "output_loading_info": True}
    with quiet():
        model, info = cls.from_pretrained(src, **how)
    if made_up := sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"]))):
        raise ConversionRefused(
            f"{src}: {cls.__name__} has {made_up[0]} and the checkpoint has not: download it whole, or pass the "
            "model_class it was saved from"
        )
    if level == "exact":
        return PlannedPostNorm(source, exact_post_norm(model.eval()))
    batches = _batches(src, config, cls, texts or _sentences(), trust_remote_code)
    if not batches:
        raise ConversionRefused(f"{src}: fit needs text, and there is no tokenizer: add one, or choose exact")
    if len(batches) < HELD_OUT:
        raise ConversionRefused(f"{src}: fit needs {HELD_OUT} texts or more, and {len(batches)} are here: add some")
    return PlannedPostNorm(source, fit_post_norm(model.eval(), batches))


def convert_post_norm(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    level: str,
    *,
    trust_remote_code: bool = False,
    model_class=None,
    texts: list[str] | None = None,
    prompts: list[str] | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
    restart: bool = False,
    planned: PlannedPostNorm | None = None,
) -> PostNormCheckpoint:
    """Convert a post-norm model (BERT, BART), whose norms read the output of norms.

    Args:
        src, dst, trust_remote_code, model_class, prompts, verify, allow_pickle, restart: as in `convert_checkpoint`.
        level: ``"exact"``: two more neurons in every FFN, embedding and FFN norms become RMSNorms with equal outputs.
            ``"fit"``: all norms, approximately, by least squares on text; the loss is measured and recorded.
        texts: what to fit and measure on; sentences of Python's help texts without it.
        planned: what `plan_post_norm` returned for the same arguments, if it has been called.

    Raises:
        ConversionRefused: the model has not the form that the level needs; the message says what is missing.
        ConversionError: source or destination do not allow it; the message says what to do. DST does not exist then.
        VerificationFailed: what was written does not pass; it stays unpublished, beside a report.
    """
    dst = destination(src, dst)
    how = {"trust_remote_code": trust_remote_code, "model_class": model_class}
    planned = planned or plan_post_norm(src, level, texts=texts, allow_pickle=allow_pickle, **how)
    source, made = planned.source, provenance(src)
    described = json.dumps([level, texts, made], sort_keys=True)
    identity = {"plan": hashlib.sha256(described.encode()).hexdigest(), "source": source.fingerprints}
    judge = partial(_verify, src, level=level, run=verify, texts=prompts or _sentences()[:VERIFIED], **how)
    judged = Judged(dst, judge, partial(_write_card, planned=planned, made=made))
    with ExitStack() as stack:
        with clear_errors(dst):
            staging = stack.enter_context(staging_for(dst, identity, restart=restart))
            if staging.published:
                staging.clean_up()
                return PostNormCheckpoint(dst, planned, judged.verification)
            _write(planned, staging.model, made)
            source.check_unchanged()
        run_check(judged.check, staging)
        with clear_errors(dst):
            staging.publish()
    return PostNormCheckpoint(dst, planned, judged.verification)


def _write(planned: PlannedPostNorm, folder: Path, made: dict[str, str]) -> None:
    source, done = planned.source, planned.conversion
    copy_others(source, folder, set(source.others))
    sizes = [sum(tensor.nbytes for tensor in shard.tensors.values()) for shard in source.shards]
    grown = sum(tensor.nbytes for tensor in done.tensors.values()) - sum(sizes)
    # Transformers asks for the format; where there are shards, their index holds the record.
    metadata = {"format": "pt", RECORD_KEY: json.dumps(made, sort_keys=True)}
    save_torch_state_dict(done.tensors, folder, max_shard_size=max(sizes) + max(grown, 0), metadata=metadata)
    config = {**source.config, **done.config, "architectures": [done.report.model_class]}
    config[RECORD_KEY] = {**config[RECORD_KEY], **made}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_card(folder: Path, verification: Verification, planned: PlannedPostNorm, made: dict[str, str]) -> None:
    """Add a section to the model card, and the report beside it."""
    described = {**made, **planned.to_dict(), "verification": verification.to_dict()}
    (folder / "conversion_report.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
    text = f"""{CARD_TEXTS[planned.report.level]} It loads like any checkpoint of its architecture, and
`hf_rmsnorm.patch_model` runs it as RMSNorm. What was done is in `conversion_report.json`.

```
{planned.report}
{verification}
```
"""
    add_to_card(folder, CARD_HEADING, text, made)


def _verify(src, folder: Path, *, level: str, run: bool, texts: list[str], **how) -> Verification:
    if not run:
        return Verification(True, "source and result were not run, as asked")
    given = _batches(src, *config_and_class(src, **how), texts, how["trust_remote_code"])
    with side_by_side(src, folder, given=given, **how) as pair:
        runs = {"as LayerNorm": pair.judge()[0], "as RMSNorm": pair.judge_as_rms()[0]}
    judged = ["as LayerNorm", "as RMSNorm"] if level == "exact" else ["as LayerNorm"]
    passed = all(runs[name]["verdict"] == "PASS" for name in judged)
    if level == "fit":
        runs["as RMSNorm"]["verdict"] = "approximate, as measured"
    summary = f"source and result run side by side: {'PASS' if passed else 'FAIL'}"
    return Verification(passed, summary, runs)


def _batches(src, config, cls, texts: list[str], trust_remote_code: bool) -> list[dict]:
    """Keyword arguments of the forward, a batch for each text; none where there is no tokenizer."""
    tokenizer = tokenizer_of(src, cls, trust_remote_code)
    if tokenizer is None:
        return []
    how = {"return_tensors": "pt", "truncation": True, "max_length": min(TOKENS, max_positions(config))}
    inputs = [tokenizer(text, **how) for text in texts]
    accepted = inspect.signature(cls.forward).parameters
    inputs = [{k: v for k, v in dict(each).items() if k in accepted} for each in inputs]
    if config.is_encoder_decoder:
        inputs = [{**each, "decoder_input_ids": each["input_ids"]} for each in inputs]
    return [each for each in inputs if isinstance(each["input_ids"], torch.Tensor) and each["input_ids"].numel()]


def _sentences() -> list[str]:
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
    return [sentence.strip() for sentence in text.split(". ") if 20 < len(sentence) < 300][:SENTENCES]
