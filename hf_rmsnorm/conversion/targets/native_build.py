"""Make the native target of a config: the config of its architecture, and how each of
its tensors is computed. `plan_native` makes it of the checkpoint, and of the proxy model,
on which it is proven.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from ...converted.record import RECORD_KEY, trained_as_rms
from ..errors import ConversionRefused
from ..plan import Centre
from ..proxy.model import empty_model, shapes_of
from ..tensors import Lazy, Stored, filled, folded_bias, plus
from .native_rules import PAIRS, NativePair

WITHOUT = 'convert it without target="native"'
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm"
# The linears that write to the residual stream; the others read a norm.
WRITERS = ("o_proj", "down_proj")
# The source's tensors that give a linear of the target a bias.
BIASES = ("_proj.bias", "_layernorm.bias")
NORM_OF = {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}


def native_target(
    config: PretrainedConfig, name: Callable[[str], str] = str
) -> "NativeTarget":
    """The target of a causal language model; refused if there is none.

    Args:
        name: the name in the source of a tensor of the model.
    """
    pair = pair_of(config.model_type)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    architecture, *_ = config.architectures or [cls.__name__]
    if architecture != cls.__name__:
        raise ConversionRefused(
            f"{architecture} has no native target: only causal language models have; "
            f"{WITHOUT}"
        )
    for setting, reason in pair.refusals.items():
        if getattr(config, setting):
            raise refused(config, reason)
    parameters = shapes_of(empty_model(cls, config))
    return NativeTarget(config, pair, parameters, name)


def pair_of(kind: str) -> NativePair:
    """The pair of a model type; refused if there is none."""
    if kind in PAIRS:
        return PAIRS[kind]
    known = ", ".join(sorted(PAIRS))
    raise ConversionRefused(
        f"{kind} has no native target: no RMSNorm architecture is known that computes "
        f"what {kind} does; there are targets for {known}; {WITHOUT}"
    )


def refused(config: PretrainedConfig, reason: str) -> ConversionRefused:
    source = config.model_type
    target = PAIRS[source].target
    why = f"{source} does not become {target}: {reason}; {WITHOUT}"
    return ConversionRefused(why)


class NativeTarget:
    """A checkpoint of an RMSNorm architecture with the logits of a LayerNorm one.

    Args:
        source: the config of the LayerNorm one.
        parameters: of its untied model.

    Attributes:
        config: of the target.
        tensors: of the target, computed from those of the source.
        zero: tensors of the source that have to be 0, as the target has no place for
            them.
    """

    def __init__(self, source: PretrainedConfig, pair: NativePair, parameters, name):
        self._source = source
        self._pair = pair
        self._parameters = parameters
        self._name = name
        # the residual weights of a model trained as RMSNorm keep their mean
        self._keeps_means = trained_as_rms(getattr(source, RECORD_KEY, None))
        rope, self._rows = self._rotary()
        config_class = CONFIG_MAPPING[pair.target]
        self.config = config_class(**self._settings(config_class, rope))
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        self.architecture = model_class.__name__
        self.config.architectures = [self.architecture]
        self.config.dtype = source.dtype
        names = shapes_of(empty_model(model_class, self.config))
        if self.config.tie_word_embeddings:
            del names[HEAD]
        self.tensors = {name: self._tensor(name) for name in names}
        final_bias = self._stored(f"{FINAL_NORM}.bias")
        self.zero = () if final_bias is None else (final_bias.key,)

    def _settings(self, config_class, rope: dict) -> dict[str, Any]:
        """Keyword arguments of the target's config: settings that both share, then the
        particular ones.
        """
        config = self._source
        known = {setting.name for setting in fields(config_class)}
        known -= {"architectures", "dtype", *vars(PretrainedConfig)}
        shared = {n: getattr(config, n) for n in sorted(known) if hasattr(config, n)}
        eps = self._pair.eps
        has_biases = any(name.endswith(BIASES) for name in self._parameters)
        # Centring a table that is also the head changes the logits, unless the final
        # norm has no weight: then each row that the head reads sums to 0.
        has_weight = f"{FINAL_NORM}.weight" in self._parameters
        particular = {
            "rope_parameters": rope,
            "rms_norm_eps": getattr(config, eps) if isinstance(eps, str) else eps,
            "tie_word_embeddings": bool(config.tie_word_embeddings) and not has_weight,
            "attention_bias": has_biases,
            "mlp_bias": has_biases,
        }
        return shared | particular

    def _tensor(self, name: str) -> Lazy:
        """A tensor of the target."""
        embedding = self._stored(EMBEDDING)
        if name == EMBEDDING:
            return self._centred(embedding, 1)
        if name == HEAD:
            return embedding if self._source.tie_word_embeddings else self._stored(HEAD)
        *_, block, module, kind = name.split(".")
        rows = self._rows.get(module)
        own = self._stored(name, rows)
        if "norm" in module:
            if own is None:
                return filled(embedding, 1.0, axis=1)
            offset = self._pair.weight_offset
            return plus(own, offset) if offset else own
        weight = self._stored(name.removesuffix(kind) + "weight", rows)
        if module in WRITERS:
            return filled(weight, 0.0) if own is None else self._centred(own, 0)
        if kind == "weight":
            return own
        norm = name.replace(f"{block}.{module}", NORM_OF[block])
        shift = self._stored(norm)  # its bias
        if shift is not None:
            return folded_bias(weight, shift, own)
        return filled(weight, 0.0) if own is None else own

    def _stored(self, name: str, rows: torch.Tensor | None = None) -> Stored | None:
        """A tensor of the source; None if it has no such tensor."""
        if name not in self._parameters:
            return None
        return Stored(self._name(name), rows)

    def _centred(self, tensor: Stored, axis: int) -> Stored:
        if self._keeps_means:
            return tensor
        step = Centre(tensor.key, axis, self._source.hidden_size)
        return replace(tensor, step=step)

    def _rotary(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The target's rope_parameters, and projection -> its rows in the order of the
        target, if they move.

        The target rotates all channels of a head, those from `rotated` on by nothing.
        """
        source = self._source
        rope = dict(source.rope_parameters)
        heads = source.num_attention_heads
        channels = getattr(source, "head_dim", None) or source.hidden_size // heads
        rotated = int(channels * (rope.pop("partial_rotary_factor", None) or 1.0))
        if rotated == channels:
            return rope, {}
        kind = rope["rope_type"]
        if kind != "default":
            why = f"{rotated} of {channels} channels are rotated and scaled ({kind})"
            raise refused(source, why)
        proportional = {
            "rope_type": "proportional",
            "rope_theta": float(rope["rope_theta"]) ** (channels / rotated),
            "partial_rotary_factor": rotated / channels,
        }
        still = torch.arange(rotated, channels).view(-1, 2)
        moved = torch.empty(channels, dtype=torch.long)
        moved[_pairs(channels)] = torch.cat([_pairs(rotated), still])
        rows = {}
        key_heads = source.num_key_value_heads or heads
        for linear, count in (("q_proj", heads), ("k_proj", key_heads)):
            by_head = torch.arange(count * channels).view(count, channels)
            rows[linear] = by_head[:, moved].flatten()
        return proportional, rows


def _pairs(channels: int) -> torch.Tensor:
    """The channels that are rotated together, in the order of their frequencies: shape
    (channels / 2, 2).
    """
    return torch.arange(channels).view(2, -1).T
