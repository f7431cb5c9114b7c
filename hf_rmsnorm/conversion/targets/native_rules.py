"""Which LayerNorm architecture computes the same as which RMSNorm one: the one file
that names architectures.

Sources and targets here share the tensor names of LLaMA. Once the residual weights are
centred, the norms' biases fold into the linears that read them.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class NativePair:
    """A target, and how the norms of the source architecture compute.

    Args:
        target: its model type.
        eps: of the norms: an attribute of the config, or the number.
        weight_offset: a number that the norms add to their weight.
        refusals: attribute of the source's config -> why there is no target if it is
            set.
    """

    target: str
    eps: str | float
    weight_offset: float = 0.0
    refusals: dict[str, str] = field(default_factory=dict)


PAIRS: dict[str, NativePair] = {
    "olmo": NativePair(
        target="llama",
        eps=1e-5,
        refusals={"clip_qkv": "it clips queries, keys and values (clip_qkv)"},
    ),
    "jais2": NativePair(target="arcee", eps="layer_norm_eps"),
    "nemotron": NativePair(target="arcee", eps="norm_eps", weight_offset=1.0),
    "stablelm": NativePair(
        target="llama",
        eps="layer_norm_eps",
        refusals={
            "use_parallel_residual": "attention and MLP read the stream side by side",
            "qk_layernorm": "its queries and keys have norms of their own",
        },
    ),
}
