"""Make the native target of a config: the config of its architecture, and how each of its tensors is computed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from ...record import RECORD_KEY, trained_as_rms
from ..plan import ConversionRefused
from ..tensors import Centring, Lazy, Scaling, Stored, filled, folded_bias, plus
from .native_rules import PAIRS, NativePair

WITHOUT = 'convert it without target="native"'


class Clip(NamedTuple):
    """Query, key and value of a layer, and the number that the source clips them to."""

    weight: Stored
    gain: Lazy | None
    bias: Stored | None
    limit: float


@dataclass(frozen=True)
class NativeTarget:
    """A checkpoint of an RMSNorm architecture that computes what a LayerNorm one does."""

    source_type: str
    config: PretrainedConfig  # of the target
    tensors: dict[str, Lazy] = field(repr=False)  # of the target, computed from those of the source
    zero: tuple[str, ...]  # tensors of the source that have to be 0, as the target has nowhere to put them
    clips: tuple[Clip, ...] = field(repr=False)  # what must never reach the number that it is clipped to
    fold_affine: bool  # the norms' weights are folded into what reads them
    centred: bool  # what writes to the residual stream; that of a model trained as RMSNorm is not

    @property
    def model_type(self) -> str:
        """Of the target."""
        return self.config.model_type

    def __str__(self) -> str:
        must = f"; {', '.join(self.zero)} must be 0" if self.zero else ""
        return f"{self.source_type} as {self.config.architectures[0]}: {len(self.tensors)} tensors{must}"


def build_target(
    config: PretrainedConfig, present: Callable[[str], bool], fold_affine: bool, name: Callable[[str], str] = str
) -> NativeTarget:
    """The target of a source's config; refused where there is none.

    Args:
        present: whether the source has a tensor of this name.
        fold_affine: fold the norms' weights too into the linears that read them, so that they are ones.
        name: what the source calls a tensor.
    """
    if config.model_type not in PAIRS:
        none = f"no RMSNorm architecture is known that computes what {config.model_type} does"
        raise ConversionRefused(f"{none}: {WITHOUT}; there are targets for {', '.join(sorted(PAIRS))}")
    pair = PAIRS[config.model_type]
    for reason, holds in pair.refusals:
        if holds(config):
            raise refused(config.model_type, pair.target, reason)
    return _Builder(config, pair, present, fold_affine, name).target()


def refused(source: str, target: str, reason: str) -> ConversionRefused:
    return ConversionRefused(f"{source} does not become {target}: {reason}; {WITHOUT}")


class _Builder:
    """Makes one target; `present` tells which biases the source has."""

    def __init__(self, config, pair: NativePair, present, fold_affine: bool, name: Callable[[str], str]):
        self.config, self.pair, self.present, self.fold_affine = config, pair, present, fold_affine
        self.name = name
        # What was trained as RMSNorm is one with the weights that it has.
        self.centred = not trained_as_rms(getattr(config, RECORD_KEY, None))
        self.tensors: dict[str, Lazy] = {}
        self.clips: list[Clip] = []
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.rope, self.moved = self._rotary()

    def target(self) -> NativeTarget:
        config, pair = self.config, self.pair
        linears = (*pair.projections, pair.output, *(old for _, old, _ in pair.mlp(config, 0)))
        biases = [f"{pair.layer.format(0)}{name}.bias" for name in (pair.attention_norm, *linears)]
        self.biased = bool(pair.biases) and any(map(self.present, biases))
        tied = bool(config.tie_word_embeddings)
        # Centring a table that is also the head changes the logits, unless the final norm has no weight: then what
        # the head reads sums to 0.
        keeps_tie = tied and not self.present(f"{pair.final_norm}.weight")
        embedding = self._tensor(f"{pair.embedding}.weight")
        self.tensors["model.embed_tokens.weight"] = embedding.then(Centring(1)) if self.centred else embedding
        for number in range(config.num_hidden_layers):
            self._layer(f"model.layers.{number}.", pair.layer.format(number), number)
        gain, final_bias = self._norm("model.norm", pair.final_norm)
        head = embedding if tied else self._tensor("lm_head.weight")
        if not keeps_tie:
            self.tensors["lm_head.weight"] = self._scaled(head, gain)
        zero = (final_bias.like,) if final_bias else ()
        made = CONFIG_MAPPING[pair.target](**self._settings(keeps_tie))
        made.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(made)].__name__]
        made.dtype = config.dtype
        done = self.tensors, zero, tuple(self.clips)
        return NativeTarget(config.model_type, made, *done, self.fold_affine, self.centred)

    def _settings(self, keeps_tie: bool) -> dict[str, Any]:
        """Keyword arguments of the target's config: what both know by one name, then what is particular."""
        config, pair = self.config, self.pair
        known = {f.name for f in fields(CONFIG_MAPPING[pair.target])} - {"architectures", "dtype"}
        own = sorted(name for name in known if name not in vars(PretrainedConfig) and hasattr(config, name))
        return {
            **{name: getattr(config, name) for name in own},
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_parameters": self.rope,
            "rms_norm_eps": getattr(config, pair.eps) if isinstance(pair.eps, str) else pair.eps,
            "tie_word_embeddings": keeps_tie,
            **dict.fromkeys(pair.biases, self.biased),
            **pair.settings(config),
        }

    def _norm(self, new: str, old: str) -> tuple[Lazy | None, Stored | None]:
        """Make the weight of a norm; the source's weight and bias are returned, for what reads it."""
        gain: Lazy | None = self._stored(f"{old}.weight")
        if gain is not None and self.pair.weight_offset:
            gain = plus(gain, self.pair.weight_offset)
        ones = filled(self._tensor(f"{self.pair.embedding}.weight"), 1.0, axis=1)
        self.tensors[f"{new}.weight"] = ones if gain is None or self.fold_affine else gain
        return gain, self._stored(f"{old}.bias")

    def _tensor(self, name: str, rows: torch.Tensor | None = None) -> Stored:
        return Stored(self.name(name), rows)

    def _stored(self, name: str, rows: torch.Tensor | None = None) -> Stored | None:
        return self._tensor(name, rows) if self.present(name) else None

    def _scaled(self, weight: Stored, gain: Lazy | None) -> Stored:
        return weight.then(Scaling(1, gain)) if gain is not None and self.fold_affine else weight

    def _linear(self, new: str, old: str, index=None, reads=(None, None), writes: bool = False) -> None:
        """Make a linear; `reads` are weight and bias of the norm that it reads."""
        gain, shift = reads
        weight, bias = self._tensor(f"{old}.weight", index), self._stored(f"{old}.bias", index)
        if writes and self.centred:
            weight, bias = weight.then(Centring(0)), bias and bias.then(Centring(0))
        self.tensors[f"{new}.weight"] = self._scaled(weight, gain)
        if shift is not None:
            bias = folded_bias(weight, shift, bias)
        if self.biased:
            self.tensors[f"{new}.bias"] = bias or filled(weight, 0.0)

    def _layer(self, new: str, old: str, number: int) -> None:
        pair = self.pair
        reads = self._norm(f"{new}input_layernorm", old + pair.attention_norm)
        for part, (name, index) in enumerate(self._projections()):
            self._linear(f"{new}self_attn.{'qkv'[part]}_proj", old + name, index, reads)
        limit = pair.clip(self.config)
        for name in pair.projections if limit is not None else ():
            weight, bias = self._tensor(f"{old}{name}.weight"), self._stored(f"{old}{name}.bias")
            self.clips.append(Clip(weight, reads[0], bias, limit))
        self._linear(f"{new}self_attn.o_proj", old + pair.output, writes=True)
        if pair.mlp_norm is not None:
            reads = self._norm(f"{new}post_attention_layernorm", old + pair.mlp_norm)
        biased = self.biased
        self.biased = biased and pair.biases[-1] != "attention_bias"  # else its MLP has none
        for made, name, writes in pair.mlp(self.config, number):
            self._linear(new + made, old + name, reads=(None, None) if writes else reads, writes=writes)
        self.biased = biased
        for name, (tensor, writes) in pair.experts(self.config, old).items():
            tensor = replace(tensor, like=self.name(tensor.like))
            self.tensors[new + name] = tensor if writes else self._scaled(tensor, reads[0])

    def _projections(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Name and rows of query, key and value."""
        names, start = self.pair.projections, 0
        for part, count in enumerate((self.heads, self.kv_heads, self.kv_heads)):
            index = torch.arange(count * self.head_dim).view(count, self.head_dim)
            if len(names) == 1:
                index = index + start
            start += count * self.head_dim
            if self.moved is not None and part < 2:
                index = index[:, self.moved]
            whole = len(names) > 1 and (self.moved is None or part == 2)
            yield names[part if len(names) > 1 else 0], None if whole else index.flatten()

    def _rotary(self) -> tuple[dict[str, Any], torch.Tensor | None]:
        """The target's rope_parameters, and the channel of a head in the source at each place in the target."""
        rope = dict(self.config.rope_parameters)
        share = rope.pop("partial_rotary_factor", None) or 1.0
        rotated, channels = int(self.head_dim * share), self.head_dim
        if rotated < channels:
            theta, kind = float(rope["rope_theta"]) ** (channels / rotated), rope["rope_type"]
            if kind != "default" or theta > torch.finfo(torch.float32).max or rotated % 2 or channels % 2:
                scaled = "" if kind == "default" else f" and scaled ({kind})"
                how = f"rotated{scaled}, with theta {rope['rope_theta']}"
                raise refused(self.config.model_type, self.pair.target, f"{rotated} of {channels} channels are {how}")
            factor = rotated / channels
            if int(factor * channels) != rotated:  # it rounded down, as the model will
                factor = (rotated + 0.5) / channels
            rope = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": factor}
        old = _pairs(rotated, self.pair.interleaved)
        if rotated < channels:
            old = torch.cat([old, torch.arange(rotated, channels).view(-1, 2)])
        moved = torch.empty(channels, dtype=torch.long)
        moved[_pairs(channels, self.pair.interleaved)] = old
        return rope, None if torch.equal(moved, torch.arange(channels)) else moved


def _pairs(channels: int, interleaved: bool) -> torch.Tensor:
    """The channels that are rotated together, in the order of their frequencies: shape (channels / 2, 2)."""
    every = torch.arange(channels)
    return every.view(-1, 2) if interleaved else every.view(2, -1).T
