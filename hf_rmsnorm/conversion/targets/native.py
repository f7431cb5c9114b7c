"""`plan_native`: a LayerNorm checkpoint written as one of an architecture that uses
RMSNorm.

`plan_conversion` calls it for ``target="native"``. `native_rules.py` says which
architectures compute the same, `native_build.py` how each tensor of the target is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from ..card import add_to_card, provenance
from ..checkpoint.source import Checkpoint
from ..errors import ConversionError
from ..proxy.keys import naming, saved_tensors
from ..proxy.model import (
    ProxyModel,
    config_of,
    give_weights,
    make_proxy,
    new_model,
)
from ..proxy.prove import BOUND, difference, load_tensors
from ..proxy.run import in_double, run
from ..verify.compare import Verification, as_it_computes
from .native_build import NativeTarget, native_target, pair_of, refused
from .planned import PlannedConversion

CARD_HEADING = "## Converted to an RMSNorm architecture"


def plan_native(source: Checkpoint) -> PlannedNative:
    """The native target of an open checkpoint, and its proof; no code of the folder
    runs. Refused if there is none.
    """
    pair_of(source.config.get("model_type"))
    config = config_of(source.folder)
    proxy = make_proxy(source.folder)
    target = native_target(config, naming(source.tensors, proxy.model))
    for tensor in target.tensors.values():
        for key in sorted({*tensor.keys} - source.tensors.keys()):
            raise ConversionError(
                f"{source.folder}: no tensor {key}: the checkpoint is not whole, "
                "download it again"
            )
    for key in target.zero:
        if source.read(key).any():
            why = f"{key}, the final norm's bias, is not 0, and the target's head has no bias"
            raise refused(config, why)
    apart = prove_native(proxy)
    if not apart <= BOUND:
        difference = (
            f"the float64 logits of {target.architecture} differ by {apart:.1e}"
        )
        raise refused(config, difference)
    origin = {**provenance(source.folder), "source_type": config.model_type}
    return PlannedNative(origin, target, apart)


@torch.no_grad()
def prove_native(proxy: ProxyModel) -> float:
    """Convert a small random model in memory, load the result with the target's class,
    and compare in float64: the largest difference of the logits over the largest logit.
    """
    cls = type(proxy.model)
    target = native_target(proxy.config)
    with in_double():  # frequencies of rotation too
        source = new_model(cls, proxy.config)
    give_weights(source, seed=3)
    for name in target.zero:
        source.get_parameter(name).zero_()
    saved = Checkpoint(saved_tensors(source))
    tensors = {name: tensor.value(saved) for name, tensor in target.tensors.items()}
    result_class = getattr(transformers, target.architecture)
    with in_double():
        result = load_tensors(result_class, target.config, tensors)
    expected = run(as_it_computes(source), proxy.inputs)
    return difference(expected[:1], run(result, proxy.inputs)[:1])


@dataclass(frozen=True)
class PlannedNative(PlannedConversion):
    """A target, and its proof on a small random model of the same classes.

    Args:
        difference: of the float64 logits, at most, over the largest of them.
    """

    target: NativeTarget
    difference: float

    def to_dict(self) -> dict:
        target = self.target
        tensors = target.tensors.items()
        return {
            "source_type": self.provenance["source_type"],
            "target_type": target.config.model_type,
            "architecture": target.architecture,
            "tensors": {name: sorted(made.keys) for name, made in tensors},
            "proof": {"passed": True, "difference": self.difference},
        }

    def __str__(self) -> str:
        target = self.target
        return (
            f"{self.provenance['source_type']} as {target.architecture}: proven, float64 logits "
            f"differ by {self.difference:.1e} of their scale; {len(target.tensors)} "
            "tensors"
        )

    def config(self, source):
        return self.target.config.to_json_string()

    def tensors(self, source):
        return self.target.tensors

    def describe(self, folder: Path, verification: Verification) -> None:
        target = self.target
        source = self.provenance["source_type"]
        text = f"""{source} uses LayerNorm. In this {target.architecture} the norms are RMSNorm, as each
residual weight had its mean subtracted. The norms' biases were added to the linear layers that read
them. The logits are the same. Any program that runs {target.config.model_type} runs it."""
        add_to_card(folder, CARD_HEADING, text, self.provenance, self, verification)
