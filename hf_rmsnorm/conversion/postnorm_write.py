"""A converted post-norm model as a folder: small enough to be held in memory, staged and published like any other."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from .pair import model_class_of, side_by_side
from .plan import ConversionRefused
from .postnorm import PostNormConversion, PostNormReport, exact_post_norm, fit_post_norm
from .source import ConversionError, open_source
from .staging import clear_errors, staging_for
from .twin import quiet
from .verify import Verification

LEVELS = ("exact", "fit")
SENTENCES = 256
TOKENS = 64


@dataclass(frozen=True)
class PostNormCheckpoint:
    """What `convert_post_norm` did."""

    dst: Path
    report: PostNormReport
    verification: Verification

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {
            "dst": str(self.dst), "report": self.report.to_dict(), "verification": self.verification.to_dict()
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.dst}\n{self.report}\n{self.verification}"


def convert_post_norm(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    level: str,
    *,
    trust_remote_code: bool = False,
    model_class=None,
    texts: list[str] | None = None,
    allow_pickle: bool = False,
    restart: bool = False,
) -> PostNormCheckpoint:
    """Convert a post-norm model (BERT, BART), whose norms read the output of norms.

    Args:
        src, dst: as in `convert_checkpoint`.
        level: ``"exact"``: two more neurons in every FFN, embedding and FFN norms become RMSNorms with equal outputs.
            ``"fit"``: all norms, approximately, by least squares on text; the loss is measured and recorded.
        texts: what to fit and measure on; sentences of Python's help texts without it.

    Raises:
        ConversionRefused: the model has not the form that the level needs; the message says what is missing.
        ConversionError: source or destination do not allow it, or the result is not what it should be.
    """
    if level not in LEVELS:
        raise ConversionRefused(f"post_norm={level!r}: choose one of {', '.join(LEVELS)}, or refuse")
    dst = Path(os.path.abspath(dst))
    with clear_errors(Path(src)):
        source = open_source(src, allow_pickle=allow_pickle)
    cls = model_class_of(src, trust_remote_code, model_class)
    with quiet():
        model = cls.from_pretrained(src, dtype="auto", trust_remote_code=trust_remote_code).eval()
    batches = _batches(src, model, texts, trust_remote_code)
    if level == "exact":
        done = exact_post_norm(model)
    elif not batches:
        raise ConversionRefused(f"{src}: fit needs text, and there is no tokenizer: add one, or choose exact")
    else:
        done = fit_post_norm(model, batches)
    described = json.dumps([level, done.report.to_dict()], sort_keys=True)
    identity = {"plan": hashlib.sha256(described.encode()).hexdigest(), "source": source.fingerprints}
    identity = json.loads(json.dumps(identity))
    with clear_errors(dst), staging_for(dst, identity, restart=restart) as staging:
        if staging.published:
            staging.clean_up()
            return PostNormCheckpoint(dst, done.report, Verification(True, "verified by the run that wrote it"))
        _write(source, model, done, staging.model)
        source.check_unchanged()
        verification = _verify(src, staging.model, level, cls, batches[:4], trust_remote_code)
        if not verification.passed:
            raise ConversionError(f"{dst}: not published, the result fails verification: {verification}")
        staging.publish()
    return PostNormCheckpoint(dst, done.report, verification)


def _write(source, model, done: PostNormConversion, folder: Path) -> None:
    for path in folder.iterdir():  # of a run that was killed
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in source.others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, folder / name)
    with quiet():
        done.build(model).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.update(done.config)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _verify(src, folder: Path, level: str, cls, given: list[dict], trust_remote_code: bool) -> Verification:
    with side_by_side(src, folder, trust_remote_code=trust_remote_code, model_class=cls, given=given) as pair:
        runs = {"as LayerNorm": pair.judge()[0], "as RMSNorm": pair.judge_as_rms()[0]}
    judged = ["as LayerNorm", "as RMSNorm"] if level == "exact" else ["as LayerNorm"]
    passed = all(runs[name]["verdict"] == "PASS" for name in judged)
    if level == "fit":
        runs["as RMSNorm"]["verdict"] = "approximate, as measured"
    summary = f"source and result run side by side: {'PASS' if passed else 'FAIL'}"
    return Verification(passed, summary, runs)


def _batches(src, model, texts: list[str] | None, trust_remote_code: bool) -> list[dict]:
    if model.main_input_name != "input_ids" or not any(Path(src).glob("*token*")):
        return []
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(src, trust_remote_code=trust_remote_code)
    how = {"return_tensors": "pt", "truncation": True, "max_length": TOKENS}
    inputs = [tokenizer(text, **how) for text in texts or _sentences()]
    accepted = set(model.forward.__code__.co_varnames)
    inputs = [{k: v for k, v in dict(each).items() if k in accepted} for each in inputs]
    if model.config.is_encoder_decoder:
        inputs = [{**each, "decoder_input_ids": each["input_ids"]} for each in inputs]
    return [each for each in inputs if isinstance(each["input_ids"], torch.Tensor) and each["input_ids"].numel()]


def _sentences() -> list[str]:
    from pydoc_data.topics import topics

    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
    return [sentence.strip() for sentence in text.split(". ") if 20 < len(sentence) < 300][:SENTENCES]
