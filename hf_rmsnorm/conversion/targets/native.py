"""`plan_native`: a LayerNorm checkpoint written as one of an architecture that uses
RMSNorm.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig

from ...record import RECORD_KEY
from ..checkpoint.layout import split
from ..checkpoint.source import FLOATS, Checkpoint
from ..plan import ConversionError, ConversionRefused
from ..proxy.keys import naming, saved_tensors
from ..proxy.model import (
    ProxyModel,
    config_of,
    give_weights,
    make_proxy,
    new_model,
    shapes_of,
)
from ..proxy.prove import BOUND, difference
from ..proxy.run import in_double, loaded, run
from ..tensors import InMemory, computed
from ..verify.folder import (
    Verification,
    add_to_card,
    as_it_computes,
    provenance,
    verify_folders,
)
from .centred import PlannedConversion
from .native_build import WITHOUT, NativeTarget, build_target, refused

CARD_HEADING = "## Converted to an RMSNorm architecture"


@dataclass(frozen=True)
class NativeProof:
    """The target of a small random model of the same classes, loaded by the target's
    class and run in float64.
    """

    source_class: str
    target_class: str
    # the largest |difference| of the logits, over the largest of them
    difference: float

    @property
    def passed(self) -> bool:
        """The difference is within the bound."""
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
            "tensors": {
                name: sorted(made.keys()) for name, made in target.tensors.items()
            },
            "must_be_zero": list(target.zero),
            "proof": {"passed": proof.passed, "difference": proof.difference},
        }

    def __str__(self) -> str:
        return f"{self.proof}\n{self.target}"

    def result(self, source: Checkpoint):
        record = {**self.made, "source_type": self.target.source_type}
        metadata = {"format": "pt", RECORD_KEY: json.dumps(record, sort_keys=True)}
        return split(
            self.target.tensors, source, metadata
        ), self.target.config.to_json_string()

    def verify(self, src, folder, how):
        return verify_folders(
            src, folder, replace(how, model_class=AutoModelForCausalLM)
        )

    def describe(self, folder: Path, verdict: Verification) -> None:
        how = (
            "had its mean subtracted"
            if self.target.centred
            else "was trained with RMSNorm in its place"
        )
        text = f"""{self.target.source_type} uses LayerNorm. Each weight that writes to the residual stream {how}. The
norms' biases were added to the linear layers that read them. The result is a {self.proof.target_class} with the same
logits. Any program that runs {self.target.model_type} runs it."""
        add_to_card(folder, CARD_HEADING, text, self.made, self.proof, verdict)


def native_target(
    config: PretrainedConfig, name: Callable[[str], str] = str
) -> NativeTarget:
    """The target of a causal language model, as by `build_target`; refused if there is
    none.
    """
    classes = [
        getattr(transformers, architecture, None)
        for architecture in config.architectures or ()
    ]
    cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if cls is None or classes[:1] not in ([], [cls]):
        architecture = (config.architectures or [type(config).__name__])[0]
        raise ConversionRefused(
            f"{architecture} has no native target: only causal language models have; {WITHOUT}"
        )
    return build_target(config, shapes_of(cls, config).__contains__, name)


def plan_native(source: Checkpoint) -> PlannedNative:
    """The native target of an open checkpoint, and its proof; no code of the folder
    runs. Refused if there is none.
    """
    model_type = source.config.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise ConversionRefused(
            f"{model_type} has no native target: Transformers does not know it; {WITHOUT}"
        )
    config = config_of(source.folder)
    # which refuses by config alone, before a tensor is read
    wanted = native_target(config)
    proxy = make_proxy(source.folder, trained=True)
    keys = set().union(*(made.keys() for made in wanted.tensors.values()))
    name = naming(source.tensors, proxy.model, optional=keys)
    _check_tensors([name(key) for key in sorted(keys)], source)
    target = native_target(config, name)
    for key in target.zero:
        if source.read(key).any():
            why = f"{key}, the final norm's bias, is not 0 and the head of {target.model_type} has no bias to take it"
            raise refused(config.model_type, target.model_type, why)
    proof = prove_native(proxy)
    if not proof.passed:
        raise ConversionRefused(f"{proof}: this model is not converted")
    return PlannedNative(provenance(source.folder), target, proof)


def _check_tensors(keys: list[str], source: Checkpoint) -> None:
    for key in keys:
        if key not in source.tensors:
            raise ConversionError(
                f"{source.folder}: no tensor {key}: the checkpoint is not whole, download it again"
            )
        if source.tensors[key].dtype not in FLOATS.values():
            cure = "convert the unquantised model, then quantise that"
            raise ConversionError(
                f"{source.folder}: {key} is {source.tensors[key].code}: it is quantised; {cure}"
            )


@torch.no_grad()
def prove_native(proxy: ProxyModel) -> NativeProof:
    """Convert a small random model in memory, load the result with the target's class,
    and compare in float64.
    """
    cls = type(proxy.model)
    target = build_target(proxy.config, shapes_of(cls, proxy.config).__contains__)
    with in_double():  # frequencies of rotation too
        source = new_model(cls, proxy.config)
    give_weights(source, seed=3)
    for name in target.zero:
        source.get_parameter(name).zero_()
    tensors = computed(target.tensors, InMemory(saved_tensors(source)))
    source = as_it_computes(source)
    result_class = getattr(transformers, target.config.architectures[0])
    with in_double():
        result, wrong = loaded(
            result_class,
            None,
            wrong=("missing_keys", "mismatched_keys", "unexpected_keys"),
            config=target.config,
            state_dict=tensors,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    if wrong:
        raise ConversionRefused(
            f"{result_class.__name__} does not load what was made for it: {wrong[0]}"
        )
    expected, got = (run(model, proxy.inputs)[:1] for model in (source, result))
    return NativeProof(cls.__name__, result_class.__name__, difference(expected, got))
