"""Which LayerNorm architecture computes the same as which RMSNorm one: the one file
that names architectures.

Sources and targets here share the tensor names of LLaMA. Once the residual weights are
centred, the norms' biases fold into the linears that read them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

GATED = ("gate_proj", "up_proj", "down_proj")


def _gated(config, layer: int) -> list[str]:
    return [f"mlp.{name}" for name in GATED]


def _plain(config, layer: int) -> list[str]:
    return ["mlp.up_proj", "mlp.down_proj"]


def _gated_or_sparse(config, layer: int) -> list[str]:
    if config.mlp_layer_types[layer] == "dense":
        return _gated(config, layer)
    blocks = [f"mlp.experts.{number}" for number in range(config.num_experts)]
    if config.num_shared_experts:
        blocks.append("mlp.shared_experts")
    return ["mlp.gate", *(f"{block}.{name}" for block in blocks for name in GATED)]


@dataclass(frozen=True)
class NativePair:
    """A target, and how the norms and heads of the source architecture compute.

    Args:
        target: its model type.
        eps: of the norms: an attribute of the config, or the number.
        mlp: the linears of a layer's MLP.
        side_by_side: attention and MLP read the same norm.
        weight_offset: a number that the norms add to their weight.
        interleaved: neighbouring channels are rotated together, and not the halves of a
            head.
        settings: keys of the target's config beyond those that the source's config has
            too.
        refusals: reasons against a source of this config.
        biases: keys of the target's config that switch on the biases of attention and
            MLP.
    """

    target: str
    eps: str | float
    mlp: Callable[[PretrainedConfig, int], list[str]] = _gated
    side_by_side: bool = False
    weight_offset: float = 0.0
    interleaved: bool = False
    settings: Callable[[PretrainedConfig], dict[str, Any]] = lambda config: {}
    refusals: tuple[tuple[str, Callable[[PretrainedConfig], Any]], ...] = ()
    biases: tuple[str, ...] = ("attention_bias", "mlp_bias")


QK_NORMS = "its queries and keys have norms of their own"


def _dense_cohere(rotate_all: bool) -> Callable[[PretrainedConfig], dict[str, Any]]:
    return lambda c: {
        "head_dim": c.hidden_size // c.num_attention_heads,
        "mlp_layer_types": ["dense"] * c.num_hidden_layers,
        "prefix_dense_intermediate_size": c.intermediate_size,
        "layer_types": ["full_attention"] * c.num_hidden_layers
        if rotate_all
        else c.layer_types,
        # 1 makes layers of full attention rotate; with any other number only those with
        # a window rotate.
        "prefix_dense_sliding_window_pattern": 1 if rotate_all else 4,
    }


def _cohere(**how) -> NativePair:
    return NativePair(
        target="cohere2_moe",
        eps="layer_norm_eps",
        side_by_side=True,
        interleaved=True,
        biases=("attention_bias",),
        **how,
    )


PAIRS: dict[str, NativePair] = {
    "olmo": NativePair(
        target="llama",
        eps=1e-5,
        biases=("attention_bias",),
        refusals=(
            (
                "it clips queries, keys and values (clip_qkv)",
                lambda c: c.clip_qkv is not None,
            ),
        ),
    ),
    "cohere": _cohere(
        settings=_dense_cohere(rotate_all=True),
        refusals=((QK_NORMS, lambda c: c.use_qk_norm),),
    ),
    "cohere2": _cohere(settings=_dense_cohere(rotate_all=False)),
    "cohere2_moe": _cohere(
        mlp=_gated_or_sparse,
        refusals=(
            (
                "its norms are RMSNorms already (rms_norm_eps)",
                lambda c: c.rms_norm_eps is not None,
            ),
        ),
    ),
    "jais2": NativePair(target="arcee", eps="layer_norm_eps", mlp=_plain),
    "nemotron": NativePair(
        target="arcee", eps="norm_eps", mlp=_plain, weight_offset=1.0
    ),
    "stablelm": NativePair(
        target="llama",
        eps="layer_norm_eps",
        refusals=(
            (
                "attention and MLP read the stream side by side, as no RMSNorm architecture does with such an MLP",
                lambda c: c.use_parallel_residual,
            ),
            (QK_NORMS, lambda c: c.qk_layernorm),
        ),
    ),
}
