"""`plan_native`: a LayerNorm checkpoint written as one of an architecture that uses RMSNorm."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from ...record import RECORD_KEY
from ..checkpoint.layout import MAX_SHARD_SIZE, split
from ..checkpoint.source import FLOATS, Checkpoint, open_checkpoint
from ..plan import ConversionError, ConversionRefused
from ..proxy.keys import naming, saved_tensors
from ..proxy.model import ProxyModel, config_of, give_weights, make_proxy, new_model, shapes_of
from ..proxy.prove import BOUND, difference
from ..proxy.run import in_double, loaded, run
from ..tensors import InMemory, Scaling, Source, computed
from ..verify.folder import Verification, add_to_card, as_it_computes, provenance, verify_folders
from .centred import PlannedConversion
from .native_build import WITHOUT, Clip, NativeTarget, build_target, refused

CARD_HEADING = "## Converted to an RMSNorm architecture"


@dataclass(frozen=True)
class NativeProof:
    """The target of a small random model of the same classes, loaded by the target's class and run in float64."""

    source_class: str
    target_class: str
    difference: float  # the largest |difference| of the logits, over the largest of them

    @property
    def passed(self) -> bool:
        """The difference is within 1e-12 of the scale."""
        return self.difference <= BOUND

    def __str__(self) -> str:
        verdict = "proven" if self.passed else "NOT equal"
        pair = f"{self.source_class} as {self.target_class}"
        return f"{pair}: {verdict}, float64 logits differ by {self.difference:.1e} of their scale"


@dataclass(frozen=True)
class PlannedNative(PlannedConversion):
    """A target and its proof."""

    target: NativeTarget
    proof: NativeProof

    def to_dict(self) -> dict:
        target, proof = self.target, self.proof
        return {
            "source_type": target.source_type,
            "target_type": target.model_type,
            "architecture": proof.target_class,
            "tensors": {name: sorted(made.keys()) for name, made in target.tensors.items()},
            "must_be_zero": list(target.zero),
            "proof": {"passed": proof.passed, "difference": proof.difference},
        }

    def __str__(self) -> str:
        return f"{self.proof}\n{self.target}"

    def result(self, source: Checkpoint, max_shard_size):
        target = self.target
        record = {**self.made, "source_type": target.source_type, "fold_affine": target.fold_affine}
        metadata = {"format": "pt", RECORD_KEY: json.dumps(record, sort_keys=True)}
        layout = split(target.tensors, source, metadata, max_shard_size or MAX_SHARD_SIZE)
        return layout, target.config.to_json_string()

    def verify(self, src, folder, how):
        return verify_folders(src, folder, replace(how, model_class=AutoModelForCausalLM)), self

    def describe(self, folder: Path, verdict: Verification) -> None:
        how = "was centred" if self.target.centred else "was trained with RMSNorm in its place"
        text = f"""{self.target.source_type} normalises with LayerNorm. Everything that writes to the residual stream
{how}, the norms' biases were folded into the linears that read them, and the result is a
{self.proof.target_class}, which gives the same logits: any program that runs {self.target.model_type} runs it."""
        add_to_card(folder, CARD_HEADING, text, self.made, self.proof, verdict)


def native_target(
    config: PretrainedConfig,
    source: Source | None = None,
    *,
    fold_affine: bool = False,
    name: Callable[[str], str] = str,
) -> NativeTarget:
    """The RMSNorm architecture that computes what a LayerNorm one does, as by `build_target`; refused without one.

    Args:
        source: its tensors. Some targets need a tensor of zeros, or weights that cannot reach a clip; without `source`
            that is taken for granted, and is said by the target's `zero` and `clips`.
        name: what the source calls a tensor.
    """
    classes = [getattr(transformers, name, None) for name in config.architectures or ()]
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if cls is None or classes[:1] not in ([], [cls]):
        name = (config.architectures or [type(config).__name__])[0]
        raise ConversionRefused(f"{name} has no native target: only causal language models have; {WITHOUT}")
    target = build_target(config, shapes_of(cls, config).__contains__, fold_affine, name)
    if source is not None and (reason := _reason_against(target, source)):
        raise refused(config.model_type, target.model_type, reason)
    return target


def _reason_against(target: NativeTarget, source: Source) -> str | None:
    for key in target.zero:
        if source.read(key).any():
            return f"{key}, the final norm's bias, is not 0 and the head of {target.model_type} has no bias to take it"
    for clip in target.clips:
        if (reached := largest_output(clip, source)) > clip.limit:
            clips = f"{target.source_type} clips queries, keys and values at {clip.limit:g} (clip_qkv)"
            return f"{clips}, and with {clip.weight.like} they may reach {reached:.3g}"
    return None


def largest_output(clip: Clip, source: Source) -> float:
    """A bound of |W (gain * x) + bias| over every normalised x: |x| is at most sqrt(n), so Cauchy-Schwarz gives it."""
    weight = clip.weight if clip.gain is None else clip.weight.then(Scaling(1, clip.gain))
    n = weight.shape(source)[1]
    norms = torch.cat([part.norm(dim=1) for _, part in weight.slices(source)]) * n**0.5
    return float((norms if clip.bias is None else norms + clip.bias.wide(source).abs()).max())


def plan_native(src, *, fold_affine: bool = False, allow_pickle: bool = False) -> PlannedNative:
    """The native target of a model folder, and its proof; no code of the folder runs. Refused where there is none."""
    source = open_checkpoint(src, allow_pickle=allow_pickle)
    model_type = source.config.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise ConversionRefused(f"{model_type} has no native target: Transformers does not know it; {WITHOUT}")
    config = config_of(source.folder)
    wanted = native_target(config)  # which refuses by config alone, before a tensor is read
    proxy = make_proxy(src, trained=True)
    keys = set().union(*(made.keys() for made in wanted.tensors.values()))
    name = naming(source.tensors, proxy.model, optional=keys)
    _check_tensors([name(key) for key in sorted(keys)], source)
    target = native_target(config, source, fold_affine=fold_affine, name=name)
    proof = prove_native(proxy, fold_affine=fold_affine)
    if not proof.passed:
        raise ConversionRefused(f"{proof}: this model is not converted")
    return PlannedNative(provenance(src), target, proof)


def _check_tensors(keys: list[str], source: Checkpoint) -> None:
    for key in keys:
        if key not in source.tensors:
            raise ConversionError(f"{source.folder}: no tensor {key}: the checkpoint is not whole, download it again")
        if source.tensors[key].dtype not in FLOATS.values():
            cure = "convert the unquantised model, then quantise that"
            raise ConversionError(f"{source.folder}: {key} is {source.tensors[key].code}: it is quantised; {cure}")


@torch.no_grad()
def prove_native(proxy: ProxyModel, *, fold_affine: bool = False) -> NativeProof:
    """Convert a small random model in memory, load the result with the target's class, and compare in float64."""
    cls = type(proxy.model)
    target = build_target(proxy.config, shapes_of(cls, proxy.config).__contains__, fold_affine)
    with in_double():  # frequencies of rotation too
        source = new_model(cls, proxy.config)
    give_weights(source, seed=3)
    parameters = dict(source.named_parameters())
    for name in target.zero:
        parameters[name].zero_()
    for clip in target.clips:  # as in the source, which `native_target` asks
        reached = largest_output(clip, InMemory(parameters))
        for made in filter(None, (clip.weight, clip.bias)):
            parameters[made.like].mul_(min(1.0, clip.limit / reached))
    tensors = computed(target.tensors, InMemory(saved_tensors(source)))
    source = as_it_computes(source)
    result_class = getattr(transformers, target.config.architectures[0])
    with in_double():
        result, wrong = loaded(
            result_class, None, wrong=("missing_keys", "mismatched_keys", "unexpected_keys"), config=target.config,
            state_dict=tensors, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager",
        )  # fmt: skip
    if wrong:
        raise ConversionRefused(f"{result_class.__name__} does not load what was made for it: {wrong[0]}")
    expected, got = (run(model, proxy.inputs)[:1] for model in (source, result))
    return NativeProof(cls.__name__, result_class.__name__, difference(expected, got))
