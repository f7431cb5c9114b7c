"""Make the native target of a config: the config of its architecture, and how each of
its tensors is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from ...record import RECORD_KEY, trained_as_rms
from ..plan import ConversionRefused
from ..tensors import Centring, Lazy, Stored, filled, folded_bias, plus
from .native_rules import PAIRS, NativePair

WITHOUT = 'convert it without target="native"'
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FINAL_NORM = "model.norm"
QUERY, KEY, VALUE = (f"self_attn.{name}_proj" for name in "qkv")
OUTPUT = "self_attn.o_proj"


@dataclass(frozen=True)
class NativeTarget:
    """A checkpoint of an RMSNorm architecture with the logits of a LayerNorm one."""

    source_type: str
    config: PretrainedConfig  # of the target
    # of the target, computed from those of the source
    tensors: dict[str, Lazy] = field(repr=False)
    # tensors of the source that have to be 0, as the target has no place for them
    zero: tuple[str, ...]

    @property
    def architecture(self) -> str:
        return self.config.architectures[0]


def build_target(
    config: PretrainedConfig,
    present: Callable[[str], bool],
    name: Callable[[str], str] = str,
) -> NativeTarget:
    """The target of a source's config; refused if there is none.

    Args:
        present: whether the source has a tensor of this name.
        name: the name in the source of a tensor of the model.
    """
    kind = config.model_type
    if kind not in PAIRS:
        none = f"no RMSNorm architecture is known that computes what {kind} does"
        known = ", ".join(sorted(PAIRS))
        raise ConversionRefused(f"{none}: {WITHOUT}; there are targets for {known}")
    for setting, reason in PAIRS[kind].refusals.items():
        if getattr(config, setting):
            raise refused(config, reason)
    return _Builder(config, PAIRS[kind], present, name).target()


def refused(config: PretrainedConfig, reason: str) -> ConversionRefused:
    source, target = config.model_type, PAIRS[config.model_type].target
    return ConversionRefused(f"{source} does not become {target}: {reason}; {WITHOUT}")


class _Builder:
    """Makes one target; `present` tells which weights and biases the source has."""

    def __init__(self, config, pair: NativePair, present, name: Callable[[str], str]):
        self.config = config
        self.pair = pair
        self.present = present
        self.name = name
        # the residual weights of a model trained as RMSNorm keep their mean
        self.centred = not trained_as_rms(getattr(config, RECORD_KEY, None))
        self.tensors: dict[str, Lazy] = {}
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        head_dim = getattr(config, "head_dim", None)
        self.head_dim = head_dim or config.hidden_size // self.heads
        self.rope, self.moved = self._rotary()
        readers = ("input_layernorm", QUERY, KEY, VALUE, OUTPUT, *pair.mlp)
        biases = [f"model.layers.0.{reader}.bias" for reader in readers]
        self.has_biases = any(map(present, biases))

    def target(self) -> NativeTarget:
        config = self.config
        tied = bool(config.tie_word_embeddings)
        # Centring a table that is also the head changes the logits, unless the final
        # norm has no weight: then each row that the head reads sums to 0.
        keeps_tie = tied and not self.present(f"{FINAL_NORM}.weight")
        embedding = self._stored(EMBEDDING)
        self.tensors[EMBEDDING] = self._centred(embedding, 1)
        for number in range(config.num_hidden_layers):
            self._layer(f"model.layers.{number}.")
        final_bias = self._norm(FINAL_NORM)
        if not keeps_tie:
            self.tensors[HEAD] = embedding if tied else self._stored(HEAD)
        made = CONFIG_MAPPING[self.pair.target](**self._settings(keeps_tie))
        made.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(made)].__name__]
        made.dtype = config.dtype
        zero = () if final_bias is None else (final_bias.like,)
        return NativeTarget(config.model_type, made, self.tensors, zero)

    def _settings(self, keeps_tie: bool) -> dict[str, Any]:
        """Keyword arguments of the target's config: settings that both share, then the
        particular ones.
        """
        config, eps = self.config, self.pair.eps
        known = {field.name for field in fields(CONFIG_MAPPING[self.pair.target])}
        known -= {"architectures", "dtype", *vars(PretrainedConfig)}
        shared = {}
        for name in sorted(known):
            if hasattr(config, name):
                shared[name] = getattr(config, name)
        return {
            **shared,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_parameters": self.rope,
            "rms_norm_eps": getattr(config, eps) if isinstance(eps, str) else eps,
            "tie_word_embeddings": keeps_tie,
            "attention_bias": self.has_biases,
            "mlp_bias": self.has_biases,
        }

    def _layer(self, layer: str) -> None:
        shift = self._norm(f"{layer}input_layernorm")
        self._linear(layer + QUERY, shift, self._rows(self.heads))
        self._linear(layer + KEY, shift, self._rows(self.kv_heads))
        self._linear(layer + VALUE, shift)
        self._writer(layer + OUTPUT)
        shift = self._norm(f"{layer}post_attention_layernorm")
        *readers, writer = self.pair.mlp
        for reader in readers:
            self._linear(layer + reader, shift)
        self._writer(layer + writer)

    def _norm(self, norm: str) -> Stored | None:
        """Make the weight of a norm; the source's bias is returned, for the linears
        that read it.
        """
        weight: Lazy | None = self._present(f"{norm}.weight")
        if weight is None:
            weight = filled(self._stored(EMBEDDING), 1.0, axis=1)
        elif self.pair.weight_offset:
            weight = plus(weight, self.pair.weight_offset)
        self.tensors[f"{norm}.weight"] = weight
        return self._present(f"{norm}.bias")

    def _linear(
        self, linear: str, shift: Stored | None, rows: torch.Tensor | None = None
    ) -> None:
        """Make a linear that reads a norm, whose bias is `shift`."""
        weight = self._stored(f"{linear}.weight", rows)
        bias: Lazy | None = self._present(f"{linear}.bias", rows)
        if shift is not None:
            bias = folded_bias(weight, shift, bias)
        self._keep(linear, weight, bias)

    def _writer(self, linear: str) -> None:
        """Make a linear that writes to the residual stream."""
        weight = self._centred(self._stored(f"{linear}.weight"), 0)
        bias = self._present(f"{linear}.bias")
        self._keep(linear, weight, bias and self._centred(bias, 0))

    def _centred(self, tensor: Stored, axis: int) -> Stored:
        if not self.centred:
            return tensor
        return tensor.then(Centring(axis))

    def _keep(self, linear: str, weight: Stored, bias: Lazy | None) -> None:
        self.tensors[f"{linear}.weight"] = weight
        if self.has_biases:
            self.tensors[f"{linear}.bias"] = bias or filled(weight, 0.0)

    def _stored(self, name: str, rows: torch.Tensor | None = None) -> Stored:
        return Stored(self.name(name), rows)

    def _present(self, name: str, rows: torch.Tensor | None = None) -> Stored | None:
        if not self.present(name):
            return None
        return self._stored(name, rows)

    def _rows(self, heads: int) -> torch.Tensor | None:
        """Rows of a projection in the order of the target; None if they stay."""
        if self.moved is None:
            return None
        rows = torch.arange(heads * self.head_dim).view(heads, -1)
        return rows[:, self.moved].flatten()

    def _rotary(self) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The target's rope_parameters, and the channel of a head in the source at each
        place in the target, if it moves.

        The target rotates all channels of a head, those from `rotated` on by nothing.
        """
        rope = dict(self.config.rope_parameters)
        channels = self.head_dim
        rotated = int(channels * (rope.pop("partial_rotary_factor", None) or 1.0))
        if rotated == channels:
            return rope, None
        if rope["rope_type"] != "default":
            how = f"rotated and scaled ({rope['rope_type']})"
            raise refused(self.config, f"{rotated} of {channels} channels are {how}")
        proportional = {
            "rope_type": "proportional",
            "rope_theta": float(rope["rope_theta"]) ** (channels / rotated),
            "partial_rotary_factor": rotated / channels,
        }
        rest = torch.arange(rotated, channels).view(-1, 2)
        moved = torch.empty(channels, dtype=torch.long)
        moved[_pairs(channels)] = torch.cat([_pairs(rotated), rest])
        return proportional, moved


def _pairs(channels: int) -> torch.Tensor:
    """The channels that are rotated together, in the order of their frequencies: shape
    (channels / 2, 2).
    """
    return torch.arange(channels).view(2, -1).T
