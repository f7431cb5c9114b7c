"""A post-norm model planned: converted in memory, and what is written of it, small enough to be held whole."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from ....record import RECORD_KEY
from ....verification.context import max_positions
from ...checkpoint.expressions import Expression, Stored
from ...checkpoint.files import changed_config
from ...checkpoint.layout import split
from ...checkpoint.shard import changed
from ...checkpoint.values import Values, open_values
from ...judge.folder import Verification
from ...judge.pair import side_by_side, tokenizer_of
from ...judge.publish import add_to_card, provenance
from ...plan import ConversionRefused
from ...twin.run import quiet
from ...twin.twin import config_and_class
from ..planned import PlannedConversion
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
class PlannedPostNorm(PlannedConversion):
    """A converted model in memory.

    Args:
        fingerprints: of the files that it was made of.
    """

    conversion: PostNormConversion
    fingerprints: dict

    @property
    def report(self) -> PostNormReport:
        """What was done and measured."""
        return self.conversion.report

    def to_dict(self) -> dict:
        return {"report": self.report.to_dict()}

    def __str__(self) -> str:
        return str(self.report)

    def result(self, values: Values, max_shard_size):
        source, done = values.checkpoint, self.conversion
        if source.fingerprints != self.fingerprints:
            raise changed(source.folder)
        values.given.update(done.tensors)
        sizes = [sum(tensor.nbytes for tensor in shard.tensors.values()) for shard in source.shards]
        grown = max(sum(tensor.nbytes for tensor in done.tensors.values()) - sum(sizes), 0)
        metadata = {"format": "pt", RECORD_KEY: json.dumps(self.made, sort_keys=True)}
        record = {**done.config[RECORD_KEY], **self.made}
        config = {**done.config, "architectures": [self.report.model_class], RECORD_KEY: record}
        tensors: dict[str, Expression] = {name: Stored(name) for name in sorted(done.tensors)}
        layout = split(tensors, values, metadata, max_shard_size or max(sizes) + grown)
        return layout, changed_config(source.config, config)

    def judge(self, src, folder, how):
        if not how.verify:
            return Verification(True, "source and result were not run, as asked"), self
        config, cls = config_and_class(src, how.trust_remote_code, how.model_class)
        texts = how.prompts or _sentences()[:VERIFIED]
        given = _batches(src, config, cls, texts, how.trust_remote_code)
        with side_by_side(src, folder, how, given) as pair:
            runs = {"as LayerNorm": pair.judge()[0], "as RMSNorm": pair.judge_as_rms()[0]}
        judged = ["as LayerNorm", "as RMSNorm"] if self.report.level == "exact" else ["as LayerNorm"]
        passed = all(runs[name]["verdict"] == "PASS" for name in judged)
        if self.report.level == "fit":
            runs["as RMSNorm"]["verdict"] = "approximate, as measured"
        return Verification(passed, f"source and result run side by side: {'PASS' if passed else 'FAIL'}", runs), self

    def describe(self, folder: Path, verdict: Verification) -> None:
        described = {**self.made, **self.to_dict(), "verification": verdict.to_dict()}
        (folder / "conversion_report.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        text = f"""{CARD_TEXTS[self.report.level]} It loads like any checkpoint of its architecture, and
`hf_rmsnorm.patch_model` runs it as RMSNorm. What was done is in `conversion_report.json`.

```
{self.report}
{verdict}
```
"""
        add_to_card(folder, CARD_HEADING, text, self.made)


def plan_post_norm(
    src, level: str, *, trust_remote_code: bool, model_class, texts: list[str] | None, allow_pickle: bool
) -> PlannedPostNorm:
    """Convert a post-norm model in memory; nothing is written.

    Args:
        level: ``"exact"``: two more neurons in every FFN, embedding and FFN norms become RMSNorms with equal outputs.
            ``"fit"``: all norms, approximately, by least squares on text; the loss is measured and recorded.

    Raises:
        ConversionRefused: the model has not the form that the level needs; the message says what is missing.
        ConversionError: this is no whole checkpoint folder.
    """
    with open_values(src, allow_pickle=allow_pickle) as values:
        fingerprints = values.checkpoint.fingerprints
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
        return PlannedPostNorm(provenance(src), exact_post_norm(model.eval()), fingerprints)
    batches = _batches(src, config, cls, texts or _sentences(), trust_remote_code)
    if not batches:
        raise ConversionRefused(f"{src}: fit needs text, and there is no tokenizer: add one, or choose exact")
    if len(batches) < HELD_OUT:
        raise ConversionRefused(f"{src}: fit needs {HELD_OUT} texts or more, and {len(batches)} are here: add some")
    return PlannedPostNorm(provenance(src), fit_post_norm(model.eval(), batches), fingerprints)


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
