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
EMBEDDING, HEAD, FINAL_NORM = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm",
)
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True)
class NativeTarget:
    """A checkpoint of an RMSNorm architecture with the logits of a LayerNorm one."""

    source_type: str
    config: PretrainedConfig  # of the target
    # of the target, computed from those of the source
    tensors: dict[str, Lazy] = field(repr=False)
    # tensors of the source that have to be 0, as the target has no place for them
    zero: tuple[str, ...]
    # whether the residual weights are centred; those of a model trained as RMSNorm are
    # not
    centred: bool

    @property
    def model_type(self) -> str:
        """Of the target."""
        return self.config.model_type

    def __str__(self) -> str:
        must = f"; {', '.join(self.zero)} must be 0" if self.zero else ""
        return f"{self.source_type} as {self.config.architectures[0]}: {len(self.tensors)} tensors{must}"


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
    if config.model_type not in PAIRS:
        none = f"no RMSNorm architecture is known that computes what {config.model_type} does"
        raise ConversionRefused(
            f"{none}: {WITHOUT}; there are targets for {', '.join(sorted(PAIRS))}"
        )
    pair = PAIRS[config.model_type]
    for reason, holds in pair.refusals:
        if holds(config):
            raise refused(config.model_type, pair.target, reason)
    return _Builder(config, pair, present, name).target()


def refused(source: str, target: str, reason: str) -> ConversionRefused:
    return ConversionRefused(f"{source} does not become {target}: {reason}; {WITHOUT}")


class _Builder:
    """Makes one target; `present` tells which weights and biases the source has."""

    def __init__(self, config, pair: NativePair, present, name: Callable[[str], str]):
        self.config = config
        self.pair = pair
        self.present = present
        self.name = name
        self.centred = not trained_as_rms(getattr(config, RECORD_KEY, None))
        self.tensors: dict[str, Lazy] = {}
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // self.heads
        )
        self.rope, self.moved = self._rotary()
        linears = (
            "input_layernorm",
            *PROJECTIONS,
            "self_attn.o_proj",
            *pair.mlp(config, 0),
        )
        self.has_biases = any(
            present(f"model.layers.0.{name}.bias") for name in linears
        )

    def target(self) -> NativeTarget:
        config = self.config
        tied = bool(config.tie_word_embeddings)
        # Centring a table that is also the head changes the logits, unless the final
        # norm has no weight: then each row that the head reads sums to 0.
        keeps_tie = tied and not self.present(f"{FINAL_NORM}.weight")
        embedding = self._stored(EMBEDDING)
        self.tensors[EMBEDDING] = (
            embedding.then(Centring(1)) if self.centred else embedding
        )
        for number in range(config.num_hidden_layers):
            self._layer(f"model.layers.{number}.", number)
        final_bias = self._norm(FINAL_NORM)
        if not keeps_tie:
            self.tensors[HEAD] = embedding if tied else self._stored(HEAD)
        made = CONFIG_MAPPING[self.pair.target](**self._settings(keeps_tie))
        made.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(made)].__name__]
        made.dtype = config.dtype
        zero = () if final_bias is None else (final_bias.like,)
        return NativeTarget(config.model_type, made, self.tensors, zero, self.centred)

    def _settings(self, keeps_tie: bool) -> dict[str, Any]:
        """Keyword arguments of the target's config: settings that both share, then the
        particular ones.
        """
        config, pair = self.config, self.pair
        known = {f.name for f in fields(CONFIG_MAPPING[pair.target])} - {
            "architectures",
            "dtype",
        }
        shared = sorted(
            name
            for name in known
            if name not in vars(PretrainedConfig) and hasattr(config, name)
        )
        return {
            **{name: getattr(config, name) for name in shared},
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_parameters": self.rope,
            "rms_norm_eps": getattr(config, pair.eps)
            if isinstance(pair.eps, str)
            else pair.eps,
            "tie_word_embeddings": keeps_tie,
            **dict.fromkeys(pair.biases, self.has_biases),
            **pair.settings(config),
        }

    def _layer(self, layer: str, number: int) -> None:
        pair = self.pair
        shift = self._norm(f"{layer}input_layernorm")
        for projection, rows in zip(
            PROJECTIONS, self._rows_of_projections(), strict=True
        ):
            self._linear(layer + projection, shift, self.has_biases, rows)
        self._writer(f"{layer}self_attn.o_proj", self.has_biases)
        if not pair.side_by_side:
            shift = self._norm(f"{layer}post_attention_layernorm")
        has_biases = self.has_biases and "mlp_bias" in pair.biases
        for linear in pair.mlp(self.config, number):
            if linear.endswith("down_proj"):
                self._writer(layer + linear, has_biases)
            else:
                self._linear(layer + linear, shift, has_biases)

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
        self,
        linear: str,
        shift: Stored | None,
        has_bias: bool,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Make a linear that reads a norm, whose bias is `shift`."""
        weight = self._stored(f"{linear}.weight", rows)
        bias: Lazy | None = self._present(f"{linear}.bias", rows)
        if shift is not None:
            bias = folded_bias(weight, shift, bias)
        self._keep(linear, weight, bias, has_bias)

    def _writer(self, linear: str, has_bias: bool) -> None:
        """Make a linear that writes to the residual stream."""
        weight, bias = self._stored(f"{linear}.weight"), self._present(f"{linear}.bias")
        if self.centred:
            weight = weight.then(Centring(0))
            bias = bias and bias.then(Centring(0))
        self._keep(linear, weight, bias, has_bias)

    def _keep(
        self, linear: str, weight: Stored, bias: Lazy | None, has_bias: bool
    ) -> None:
        self.tensors[f"{linear}.weight"] = weight
        if has_bias:
            self.tensors[f"{linear}.bias"] = bias or filled(weight, 0.0)

    def _stored(self, name: str, rows: torch.Tensor | None = None) -> Stored:
        return Stored(self.name(name), rows)

    def _present(self, name: str, rows: torch.Tensor | None = None) -> Stored | None:
        return self._stored(name, rows) if self.present(name) else None

    def _rows_of_projections(self) -> list[torch.Tensor | None]:
        """Rows of query, key and value in the order of the target; None if they stay."""
        if self.moved is None:
            return [None, None, None]
        rows = [
            torch.arange(heads * self.head_dim).view(heads, -1)
            for heads in (self.heads, self.kv_heads)
        ]
        return [*(index[:, self.moved].flatten() for index in rows), None]

    def _rotary(self) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The target's rope_parameters, and the channel of a head in the source at each
        place in the target.
        """
        rope = dict(self.config.rope_parameters)
        share = rope.pop("partial_rotary_factor", None) or 1.0
        rotated, channels = int(self.head_dim * share), self.head_dim
        old = _pairs(rotated, self.pair.interleaved)
        if rotated < channels:
            rope = self._partial(rope, rotated)
            old = torch.cat([old, torch.arange(rotated, channels).view(-1, 2)])
        moved = torch.empty(channels, dtype=torch.long)
        moved[_pairs(channels, self.pair.interleaved)] = old
        return rope, None if torch.equal(moved, torch.arange(channels)) else moved

    def _partial(self, rope: dict, rotated: int) -> dict[str, Any]:
        """Parameters of a rotary embedding of all channels that leaves those from
        `rotated` on as they are.
        """
        channels, kind = self.head_dim, rope["rope_type"]
        theta = float(rope["rope_theta"]) ** (channels / rotated)
        if (
            kind != "default"
            or theta > torch.finfo(torch.float32).max
            or rotated % 2
            or channels % 2
        ):
            scaled = "" if kind == "default" else f" and scaled ({kind})"
            how = f"rotated{scaled}, with theta {rope['rope_theta']}"
            raise refused(
                self.config.model_type,
                self.pair.target,
                f"{rotated} of {channels} channels are {how}",
            )
        factor = rotated / channels
        if int(factor * channels) != rotated:
            # the quotient is rounded down, and the model rounds down again
            factor = (rotated + 0.5) / channels
        return {
            "rope_type": "proportional",
            "rope_theta": theta,
            "partial_rotary_factor": factor,
        }


def _pairs(channels: int, interleaved: bool) -> torch.Tensor:
    """The channels that are rotated together, in the order of their frequencies: shape
    (channels / 2, 2).
    """
    every = torch.arange(channels)
    return every.view(-1, 2) if interleaved else every.view(2, -1).T
