"""Make the native target of a config: the config of its architecture, and how each of
its tensors is computed.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from ...record import RECORD_KEY, trained_as_rms
from ..plan import Centre, ConversionRefused
from ..tensors import Lazy, Stored, filled, folded_bias, plus
from .native_rules import PAIRS, NativePair

WITHOUT = 'convert it without target="native"'
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "model.norm"
QUERY = "self_attn.q_proj"
KEY = "self_attn.k_proj"
VALUE = "self_attn.v_proj"
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
    parameters: Collection[str],
    name: Callable[[str], str] = str,
) -> NativeTarget:
    """The target of a source's config; refused if there is none.

    Args:
        parameters: of the source's model, untied.
        name: the name in the source of a tensor of the model.
    """
    kind = config.model_type
    if kind not in PAIRS:
        none = f"no RMSNorm architecture is known that computes what {kind} does"
        known = ", ".join(sorted(PAIRS))
        raise ConversionRefused(f"{none}: {WITHOUT}; there are targets for {known}")
    pair = PAIRS[kind]
    for setting, reason in pair.refusals.items():
        if getattr(config, setting):
            raise refused(config, reason)
    builder = _Builder(config, pair, parameters, name)
    return builder.target()


def refused(config: PretrainedConfig, reason: str) -> ConversionRefused:
    source = config.model_type
    target = PAIRS[source].target
    why = f"{source} does not become {target}: {reason}; {WITHOUT}"
    return ConversionRefused(why)


class _Builder:
    """Makes one target; `parameters` tells which weights and biases the source has."""

    def __init__(self, config, pair: NativePair, parameters, name):
        self.config = config
        self.pair = pair
        self.parameters = parameters
        self.name = name
        # the residual weights of a model trained as RMSNorm keep their mean
        record = getattr(config, RECORD_KEY, None)
        self.keeps_means = trained_as_rms(record)
        self.tensors = {}
        heads = config.num_attention_heads
        key_heads = config.num_key_value_heads or heads
        self.heads = {QUERY: heads, KEY: key_heads}
        head_dim = getattr(config, "head_dim", None)
        self.head_dim = head_dim or config.hidden_size // heads
        self.rope, self.moved = self._rotary()
        layer = ("input_layernorm", QUERY, KEY, VALUE, OUTPUT, *pair.mlp)
        biases = set()
        for module in layer:
            biases.add(f"model.layers.0.{module}.bias")
        self.has_biases = not biases.isdisjoint(parameters)

    def target(self) -> NativeTarget:
        config = self.config
        tied = bool(config.tie_word_embeddings)
        # Centring a table that is also the head changes the logits, unless the final
        # norm has no weight: then each row that the head reads sums to 0.
        keeps_tie = tied and f"{FINAL_NORM}.weight" not in self.parameters
        embedding = self._stored(EMBEDDING)
        self.tensors[EMBEDDING] = self._centred(embedding, 1)
        for number in range(config.num_hidden_layers):
            self._layer(f"model.layers.{number}.")
        final_bias = self._norm(FINAL_NORM)
        if not keeps_tie:
            head = embedding
            if not tied:
                head = self._stored(HEAD)
            self.tensors[HEAD] = head
        config_class = CONFIG_MAPPING[self.pair.target]
        settings = self._settings(config_class, keeps_tie)
        made = config_class(**settings)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
        made.architectures = [model_class.__name__]
        made.dtype = config.dtype
        zero = ()
        if final_bias is not None:
            zero = (final_bias.like,)
        return NativeTarget(config.model_type, made, self.tensors, zero)

    def _settings(self, config_class, keeps_tie: bool) -> dict[str, Any]:
        """Keyword arguments of the target's config: settings that both share, then the
        particular ones.
        """
        config = self.config
        known = set()
        for setting in fields(config_class):
            known.add(setting.name)
        known -= {"architectures", "dtype", *vars(PretrainedConfig)}
        settings = {}
        for name in sorted(known):
            if hasattr(config, name):
                settings[name] = getattr(config, name)
        eps = self.pair.eps
        if isinstance(eps, str):
            eps = getattr(config, eps)
        settings["num_attention_heads"] = self.heads[QUERY]
        settings["num_key_value_heads"] = self.heads[KEY]
        settings["head_dim"] = self.head_dim
        settings["rope_parameters"] = self.rope
        settings["rms_norm_eps"] = eps
        settings["tie_word_embeddings"] = keeps_tie
        settings["attention_bias"] = self.has_biases
        settings["mlp_bias"] = self.has_biases
        return settings

    def _layer(self, layer: str) -> None:
        shift = self._norm(f"{layer}input_layernorm")
        for linear in (QUERY, KEY, VALUE):
            self._reader(layer, linear, shift)
        self._writer(layer, OUTPUT)
        shift = self._norm(f"{layer}post_attention_layernorm")
        *readers, writer = self.pair.mlp
        for linear in readers:
            self._reader(layer, linear, shift)
        self._writer(layer, writer)

    def _norm(self, norm: str) -> Stored | None:
        """Make the weight of a norm; the source's bias is returned, for the linears
        that read it.
        """
        weight: Lazy | None = self._stored(f"{norm}.weight")
        if weight is None:
            embedding = self._stored(EMBEDDING)
            weight = filled(embedding, 1.0, axis=1)
        elif self.pair.weight_offset:
            weight = plus(weight, self.pair.weight_offset)
        self.tensors[f"{norm}.weight"] = weight
        return self._stored(f"{norm}.bias")

    def _reader(self, layer: str, linear: str, shift: Stored | None) -> None:
        """Make a linear that reads a norm, whose bias is `shift`."""
        rows = self._rows(linear)
        weight = self._stored(f"{layer}{linear}.weight", rows)
        bias: Lazy | None = self._stored(f"{layer}{linear}.bias", rows)
        if shift is not None:
            bias = folded_bias(weight, shift, bias)
        self._keep(layer + linear, weight, bias)

    def _writer(self, layer: str, linear: str) -> None:
        """Make a linear that writes to the residual stream."""
        weight = self._stored(f"{layer}{linear}.weight")
        bias = self._stored(f"{layer}{linear}.bias")
        if bias is not None:
            bias = self._centred(bias, 0)
        weight = self._centred(weight, 0)
        self._keep(layer + linear, weight, bias)

    def _keep(self, linear: str, weight: Stored, bias: Lazy | None) -> None:
        self.tensors[f"{linear}.weight"] = weight
        if self.has_biases:
            self.tensors[f"{linear}.bias"] = bias or filled(weight, 0.0)

    def _stored(self, name: str, rows: torch.Tensor | None = None) -> Stored | None:
        """A tensor of the source; None if it has no such tensor."""
        if name not in self.parameters:
            return None
        return Stored(self.name(name), rows)

    def _centred(self, tensor: Stored, axis: int) -> Stored:
        if self.keeps_means:
            return tensor
        step = Centre(tensor.like, axis, self.config.hidden_size)
        return tensor.then(step)

    def _rows(self, linear: str) -> torch.Tensor | None:
        """Rows of a projection in the order of the target; None if they stay."""
        if self.moved is None:
            return None
        if linear not in self.heads:
            return None
        heads = self.heads[linear]
        rows = torch.arange(heads * self.head_dim)
        by_head = rows.view(heads, -1)
        return by_head[:, self.moved].flatten()

    def _rotary(self) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The target's rope_parameters, and the channel of a head in the source at each
        place in the target, if it moves.

        The target rotates all channels of a head, those from `rotated` on by nothing.
        """
        rope = dict(self.config.rope_parameters)
        channels = self.head_dim
        factor = rope.pop("partial_rotary_factor", None) or 1.0
        rotated = int(channels * factor)
        if rotated == channels:
            return rope, None
        kind = rope["rope_type"]
        if kind != "default":
            count = f"{rotated} of {channels}"
            why = f"{count} channels are rotated and scaled ({kind})"
            raise refused(self.config, why)
        theta = float(rope["rope_theta"])
        proportional = {
            "rope_type": "proportional",
            "rope_theta": theta ** (channels / rotated),
            "partial_rotary_factor": rotated / channels,
        }
        turned = _pairs(rotated)
        still = torch.arange(rotated, channels).view(-1, 2)
        moved = torch.empty(channels, dtype=torch.long)
        places = _pairs(channels)
        moved[places] = torch.cat([turned, still])
        return proportional, moved


def _pairs(channels: int) -> torch.Tensor:
    """The channels that are rotated together, in the order of their frequencies: shape
    (channels / 2, 2).
    """
    halves = torch.arange(channels).view(2, -1)
    return halves.T
