"""`write_native`: a LayerNorm checkpoint written as one of an architecture that is RMSNorm by birth."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from ...record import RECORD_KEY, trained_as_rms
from ...verification.recorded import as_recorded
from ..checkpoint.expressions import Stored, Values, is_zero, largest_output
from ..checkpoint.source import Source, open_source
from ..checkpoint.write import MAX_SHARD_SIZE, Folder, Written, write_computed
from ..judge.folder import Verification
from ..judge.pair import side_by_side
from ..judge.publish import Judged, add_to_card, provenance
from ..plan import ConversionRefused
from ..twin.keys import saved_tensors
from ..twin.prove import BOUND
from ..twin.twin import Twin, config_of, give_weights, in_double, make_twin, new_model, quiet, run, shapes_of
from .native_build import NativeTarget, native_targets, refused

CARD_HEADING = "## Converted to an RMSNorm architecture"


@dataclass(frozen=True)
class NativeProof:
    """The target of a small random model of the same classes, loaded by the target's class and run in float64.

    Args:
        difference: max |difference| of the logits over `scale`, the largest |logit|.
    """

    source_class: str
    target_class: str
    difference: float
    scale: float

    @property
    def passed(self) -> bool:
        """The difference is within 1e-12 of the scale."""
        return self.difference <= BOUND

    def __str__(self) -> str:
        verdict = "proven" if self.passed else "NOT equal"
        return (
            f"{self.source_class} as {self.target_class}: {verdict}, float64 logits differ by {self.difference:.1e} "
            "of their scale"
        )


@dataclass(frozen=True)
class PlannedNative:
    """A target and its proof."""

    target: NativeTarget
    proof: NativeProof

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        target, proof = self.target, self.proof
        return {
            "source_type": target.source_type,
            "target_type": target.model_type,
            "architecture": proof.target_class,
            "tensors": {name: sorted(made.keys()) for name, made in target.tensors.items()},
            "must_be_zero": list(target.zero),
            "proof": {"passed": proof.passed, "difference": proof.difference, "scale": proof.scale},
        }

    def __str__(self) -> str:
        return f"{self.proof}\n{self.target}"


@dataclass(frozen=True)
class NativeCheckpoint:
    """What `write_native` did: the target and its proof, what was written, and how it was verified."""

    planned: PlannedNative
    written: Written
    verification: Verification

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {**self.planned.to_dict(), **self.written.to_dict(), "verification": self.verification.to_dict()}

    def __str__(self) -> str:
        return f"{self.written}\n{self.verification}"


class Memory:
    """Tensors in memory as `Values`; `aliases` are other names that they may have."""

    def __init__(self, tensors: dict[str, torch.Tensor], aliases: dict[str, str]):
        self.tensors = {**tensors, **{key: tensors[old] for key, old in aliases.items() if old in tensors}}

    def shape(self, key):
        return tuple(self.tensors[key].shape)

    def rows(self, key, first, last):
        return self.tensors[key][first:last].double().clone()


def native_target(config: PretrainedConfig, values: Values | None = None, *, fold_affine: bool = False) -> NativeTarget:
    """The RMSNorm architecture that computes what a LayerNorm one does, and how its tensors are computed.

    Args:
        config: of the source.
        values: the source's tensors. Some targets need a tensor of zeros, or weights that cannot reach a clip; without
            `values` that is taken for granted, and is said by the target's `zero` and `clips`.
        fold_affine: fold the norms' weights too into the linears that read them, so that they are ones.

    Raises:
        ConversionRefused: no such architecture; the message names the condition that fails.
    """
    classes = [getattr(transformers, name, None) for name in config.architectures or ()]
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if cls is None or classes[:1] not in ([], [cls]):
        name = (config.architectures or [type(config).__name__])[0]
        raise ConversionRefused(
            f"{name} has no native target: only causal language models have; convert it without --target native"
        )
    names = shapes_of(cls, config)
    failed = None
    for target in native_targets(config, names.__contains__, fold_affine):
        reason = _reason_against(target, values) if values is not None else None
        if reason is None:
            return target
        failed = failed or refused(target.source_type, target.model_type, reason)
    raise failed


def _reason_against(target: NativeTarget, values: Values) -> str | None:
    for key in target.zero:
        if not is_zero(Stored(key), values):
            return f"{key}, the final norm's bias, is not 0 and the head of {target.model_type} has no bias to take it"
    for clip in target.clips:
        reached = largest_output(clip.weight, clip.gain, clip.bias, values)
        if reached > clip.limit:
            return (
                f"{target.source_type} clips queries, keys and values at {clip.limit:g} (clip_qkv), and with "
                f"{clip.weight.like} they may reach {reached:.3g}"
            )
    return None


def plan_native(src: str | os.PathLike, *, fold_affine: bool = False, allow_pickle: bool = False) -> PlannedNative:
    """The native target of a model folder, and its proof; nothing is written, and no code of the folder runs.

    Args:
        src: a model folder.
        fold_affine: as in `native_target`.
        allow_pickle: as in `carry_out`.

    Raises:
        ConversionRefused: it has none, or the proof fails; the message says why.
        ConversionError: this is no whole checkpoint folder.
    """
    with ExitStack() as stack:
        target = _target_of(open_source(src, allow_pickle=allow_pickle), stack, fold_affine)
    proof = prove_native(make_twin(src, trained=True), target.model_type, fold_affine=fold_affine)
    if not proof.passed:
        raise ConversionRefused(f"{proof}: this model is not converted")
    return PlannedNative(target, proof)


def _target_of(source: Source, stack: ExitStack, fold_affine: bool) -> NativeTarget:
    model_type = source.config.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise ConversionRefused(
            f"{model_type} has no native target: Transformers does not know it; convert it without --target native"
        )
    config = config_of(source.folder)
    first = native_target(config)  # refuses by config alone, before any tensor is read
    values = Folder(source, stack, first.aliases)
    target = native_target(config, values, fold_affine=fold_affine)
    for key in sorted(set().union(*(made.keys() for made in target.tensors.values()))):
        values.floating(key)
    return target


@torch.no_grad()
def prove_native(twin: Twin, target_type: str | None = None, *, fold_affine: bool = False) -> NativeProof:
    """Convert a small random model in memory, load the result with the target's class, and compare in float64.

    Args:
        twin: of the source.
        target_type: which target, where there are several; the first by default.
        fold_affine: as in `native_target`.

    Raises:
        ConversionRefused: it has no such target, or the target's class does not load its tensors.
    """
    cls = type(twin.model)
    names = shapes_of(cls, twin.config)
    targets = native_targets(twin.config, names.__contains__, fold_affine)
    target = next(t for t in targets if target_type in (None, t.model_type))
    with in_double():  # frequencies of rotation too
        source = new_model(cls, twin.config)
    give_weights(source, seed=3)
    parameters = dict(source.named_parameters())
    for name in target.zero:
        parameters[name].zero_()
    for clip in target.clips:  # as in the source, which `native_target` asks
        reached = largest_output(clip.weight, clip.gain, clip.bias, Memory(parameters, {}))
        for made in filter(None, (clip.weight, clip.bias)):
            parameters[made.like].mul_(min(1.0, clip.limit / reached))
    values = Memory(saved_tensors(source), target.aliases)
    source = _as_it_computes(source)
    tensors = {name: torch.cat(list(made.pieces(values))) for name, made in target.tensors.items()}
    result_class = getattr(transformers, target.config.architectures[0])
    with quiet(), in_double():
        result, info = result_class.from_pretrained(
            None, config=target.config, state_dict=tensors, dtype=torch.float64, attn_implementation="eager",
            experts_implementation="eager", output_loading_info=True,
        )  # fmt: skip
    wrong = sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"], *info["unexpected_keys"])))
    if wrong:
        raise ConversionRefused(f"{result_class.__name__} does not load what was made for it: {wrong[0]}")
    expected, got = (run(model.eval(), twin.inputs)[0] for model in (source, result))
    scale = float(expected.abs().max())
    return NativeProof(cls.__name__, result_class.__name__, float((expected - got).abs().max()) / scale, scale)


def write_native(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    trust_remote_code: bool = False,
    prompts: list[str] | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
    restart: bool = False,
    planned: PlannedNative | None = None,
    fold_affine: bool = False,
    progress: Callable[[int, int, int], None] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> NativeCheckpoint:
    """Write a LayerNorm checkpoint as one of an architecture that is RMSNorm by birth, with the same logits.

    Any server of that architecture runs the result. Tensors are computed one at a time in float64, in pieces, and
    rounded once to the checkpoint's own dtype; staging, resuming and publication are as in `convert_checkpoint`.

    Args:
        src: a model folder with safetensors; it is only read.
        dst: the folder to make. It appears whole, at the end; a run that was killed is taken up by the same call.
        trust_remote_code: verify against the model code that comes with the folder, with its tokenizer.
        prompts: texts to verify on, where there is a tokenizer.
        verify: run source and result after writing, and publish only what passes.
        allow_pickle, restart, progress: as in `carry_out`.
        planned: what `plan_native` returned for `src`, if it has been called; it knows of `fold_affine`.
        fold_affine: as in `native_target`.
        max_shard_size: bytes, or "5GB" and the like, as in `save_pretrained`.

    Raises:
        ConversionRefused: there is no target that computes the same; the message names the condition that fails.
        ConversionError: source or destination do not allow it; the message says what to do. DST does not exist then.
        VerificationFailed: what was written does not pass; it stays unpublished, beside a report.
    """
    planned = planned or plan_native(src, fold_affine=fold_affine, allow_pickle=allow_pickle)
    target = planned.target
    made = provenance(src)
    record = {**made, "source_type": target.source_type, "fold_affine": target.fold_affine}
    how = {"trust_remote_code": trust_remote_code, "prompts": prompts, "run": verify}
    judged = Judged(dst, partial(verify_native, src, **how), partial(_write_card, planned=planned, made=made))
    written = write_computed(
        src, dst, target.tensors, target.config.to_json_string(), aliases=target.aliases, check=judged.check,
        metadata={"format": "pt", RECORD_KEY: json.dumps(record, sort_keys=True)}, allow_pickle=allow_pickle,
        restart=restart, progress=progress, max_shard_size=max_shard_size,
    )  # fmt: skip
    return NativeCheckpoint(planned, written, judged.verification)


def verify_native(src, folder: Path, **how) -> Verification:
    """Run a checkpoint and its native form side by side, in the checkpoint's own dtype, as `verify_folder` does.

    Args:
        how: for `judge_folders`.
    """
    return judge_folders(src, folder, model_class=AutoModelForCausalLM, **how)


def judge_folders(src, folder: Path, *, run: bool = True, **how) -> Verification:
    """Judge the second of two checkpoints by the noise floor of the first; `how` is for `side_by_side`."""
    if not run:
        return Verification(True, "source and result were not run, as asked")
    with side_by_side(src, folder, **how) as pair:
        names = f"{type(pair.source).__name__} and {type(pair.result).__name__}"
        if pair.missing:
            return Verification(False, f"{type(pair.result).__name__} does not load what was made: {pair.missing[0]}")
        pair.source = _as_it_computes(pair.source)
        if pair.source.dtype == torch.float64:  # parts of a forward stay in float32, and not the same ones in both
            pair.source, pair.result = pair.source.float(), pair.result.float()
        figures, _ = pair.judge()
    return Verification(
        figures["verdict"] == "PASS", f"{names} run side by side: {figures['verdict']}", {"result": figures}
    )


def _as_it_computes(model):
    """The model, or what `patch_model` makes of it where it was trained as RMSNorm, in plain torch."""
    return as_recorded(model) if trained_as_rms(getattr(model.config, RECORD_KEY, None)) else model


def _write_card(folder: Path, verification: Verification, planned: PlannedNative, made: dict[str, str]) -> None:
    how = "was centred" if planned.target.centred else "was trained with RMSNorm in its place"
    text = f"""{planned.target.source_type} normalises with LayerNorm. Everything that writes to the residual stream
{how}, the norms' biases were folded into the linears that read them, and the result is a
{planned.proof.target_class}, which gives the same logits: any program that runs {planned.target.model_type} runs it.

```
{planned.proof}
{verification}
```
"""
    add_to_card(folder, CARD_HEADING, text, made)
