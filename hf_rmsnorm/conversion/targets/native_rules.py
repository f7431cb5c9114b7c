"""Which LayerNorm architecture computes the same as which RMSNorm one: the one file that names architectures.

All targets use the names of LLaMA; once the residual weights are centred, the norms' biases fold into the linears that
read them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from ...record import RECORD_KEY, trained_as_rms
from ..tensors import Centring, Stored

Linears = Iterator[tuple[str, str, bool]]


def _gated(config, index: int, block: str = "mlp.") -> Linears:
    for name in ("gate_proj", "up_proj", "down_proj"):
        yield block + name, block + name, name == "down_proj"


def _plain_mlp(up: str, down: str) -> Callable[[PretrainedConfig, int], Linears]:
    return lambda config, index: iter((("mlp.up_proj", up, False), ("mlp.down_proj", down, True)))


def _gated_or_sparse(config, index: int) -> Linears:
    if config.mlp_layer_types[index] == "dense":
        yield from _gated(config, index)
        return
    yield "mlp.gate", "mlp.gate", False
    blocks = [f"mlp.experts.{number}." for number in range(config.num_experts)]
    for block in [*blocks, *(["mlp.shared_experts."] if config.num_shared_experts else [])]:
        yield from _gated(config, index, block)


def _theta(config) -> float:
    return config.rope_parameters["rope_theta"]


def _stacked_experts(config, layer: str) -> dict[str, tuple[Stored, bool]]:
    """Experts that lie one under another in three matrices, each of shape (experts * inner, hidden)."""
    made: dict[str, tuple[Stored, bool]] = {}
    is_centred = not trained_as_rms(getattr(config, RECORD_KEY, None))
    inner = config.ffn_config.ffn_hidden_size
    for number in range(config.ffn_config.moe_num_experts):
        index = torch.arange(number * inner, (number + 1) * inner)
        for new, old in (("w1", "w1"), ("w3", "v1"), ("w2", "w2")):
            writes = new == "w2"
            steps = (Centring(1),) if writes and is_centred else ()
            tensor = Stored(f"{layer}ffn.experts.mlp.{old}", index, steps, transposed=writes)
            made[f"block_sparse_moe.experts.{number}.{new}.weight"] = tensor, writes
    return made


@dataclass(frozen=True)
class NativePair:
    """A target, where the source architecture keeps its tensors, and what its norms and heads are like.

    Args:
        mlp: (name in the target, name in the source, whether it writes to the stream) of each linear of a layer.
        experts: further weights of a layer by name in the target, and whether they write to the stream.
        projections: query, key and value; or one name, of a tensor that holds them one after another.
        interleaved: neighbouring channels are rotated together, and not the halves of a head.
        settings: keys of the target's config beyond what the source's config has under the same name.
        refusals: reasons against a source of this config.
        clip: the number that queries, keys and values are clipped to, or None.
    """

    target: str  # its model type
    eps: str | float  # of the norms: an attribute of the config, or the number
    mlp: Callable[[PretrainedConfig, int], Linears] = _gated
    experts: Callable[[PretrainedConfig, str], dict[str, tuple[Stored, bool]]] = lambda config, layer: {}
    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"  # None where both read the first
    projections: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.o_proj"
    final_norm: str = "model.norm"
    weight_offset: float = 0.0  # what the norms add to their weight
    interleaved: bool = False
    settings: Callable[[PretrainedConfig], dict[str, Any]] = lambda config: {}
    refusals: tuple[tuple[str, Callable[[PretrainedConfig], Any]], ...] = ()
    biases: tuple[str, ...] = ()  # keys of the target's config that switch on those of attention and MLP
    clip: Callable[[PretrainedConfig], float | None] = lambda config: None


QK_NORMS = "its queries and keys have norms of their own"
ARCEE = {"target": "arcee", "biases": ("attention_bias", "mlp_bias")}
COHERE = {"target": "cohere2_moe", "eps": "layer_norm_eps", "mlp_norm": None, "interleaved": True}
COHERE |= {"biases": ("attention_bias",)}


def _dense_cohere(rotate_all: bool) -> Callable[[PretrainedConfig], dict[str, Any]]:
    return lambda c: {
        "head_dim": c.hidden_size // c.num_attention_heads,
        "mlp_layer_types": ["dense"] * c.num_hidden_layers,
        "prefix_dense_intermediate_size": c.intermediate_size,
        "layer_types": ["full_attention"] * c.num_hidden_layers if rotate_all else c.layer_types,
        # 1 makes layers of full attention rotate; any other number leaves that to those with a window.
        "prefix_dense_sliding_window_pattern": 1 if rotate_all else 4,
    }


PAIRS: dict[str, NativePair] = {
    "olmo": NativePair("llama", 1e-5, biases=("attention_bias",), clip=lambda c: c.clip_qkv),
    "cohere": NativePair(
        **COHERE, settings=_dense_cohere(rotate_all=True), refusals=((QK_NORMS, lambda c: c.use_qk_norm),)
    ),
    "cohere2": NativePair(**COHERE, settings=_dense_cohere(rotate_all=False)),
    "cohere2_moe": NativePair(
        **COHERE,
        mlp=_gated_or_sparse,
        refusals=(("its norms are RMSNorms already (rms_norm_eps)", lambda c: c.rms_norm_eps is not None),),
    ),
    "dbrx": NativePair(
        "mixtral",
        1e-5,
        lambda config, index: iter([("block_sparse_moe.gate", "ffn.router.layer", False)]),
        _stacked_experts,
        embedding="transformer.wte",
        layer="transformer.blocks.{}.",
        attention_norm="norm_attn_norm.norm_1",
        mlp_norm="norm_attn_norm.norm_2",
        projections=("norm_attn_norm.attn.Wqkv",),
        output="norm_attn_norm.attn.out_proj",
        final_norm="transformer.norm_f",
        settings=lambda c: {
            "intermediate_size": c.ffn_config.ffn_hidden_size,
            "num_local_experts": c.ffn_config.moe_num_experts,
            "num_experts_per_tok": c.ffn_config.moe_top_k,
            "hidden_act": c.ffn_config.ffn_act_fn.get("name", "silu"),
            "attention_dropout": c.attn_config.attn_pdrop,
            "router_aux_loss_coef": c.ffn_config.moe_loss_weight,
            "sliding_window": None,
        },
        refusals=(
            (
                "the weights of its experts do not sum to 1 (moe_normalize_expert_weights)",
                lambda c: c.ffn_config.moe_normalize_expert_weights != 1,
            ),
            (
                "attn_config names a rope_theta that Transformers does not run it with: set rope_parameters in "
                "config.json to the one that it was trained with",
                lambda c: getattr(c.attn_config, "rope_theta", _theta(c)) != _theta(c),
            ),
        ),
        clip=lambda c: c.attn_config.clip_qkv,
    ),
    "jais2": NativePair(**ARCEE, eps="layer_norm_eps", mlp=_plain_mlp("mlp.up_proj", "mlp.down_proj")),
    "nemotron": NativePair(**ARCEE, eps="norm_eps", mlp=_plain_mlp("mlp.up_proj", "mlp.down_proj"), weight_offset=1.0),
    "stablelm": NativePair(
        "llama",
        eps="layer_norm_eps",
        biases=("attention_bias", "mlp_bias"),
        refusals=(
            (
                "attention and MLP read the stream side by side, as no RMSNorm architecture does with such an MLP",
                lambda c: c.use_parallel_residual,
            ),
            (QK_NORMS, lambda c: c.qk_layernorm),
        ),
    ),
}
