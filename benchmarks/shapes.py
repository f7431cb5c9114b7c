"""Sizes of real models, as their published configurations give them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes. `model_type` is the one of Transformers; `weight_offset` and
    `qk_norm` are its norms'.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    qk_norm: bool = False
    weight_offset: float = 0.0

    def config(self, layers: int) -> dict:
        """Arguments of `AutoConfig.for_model` for a model of this shape with so many
        layers.
        """
        return {
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 32768,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


SHAPES = {
    "Llama-3.1-8B": ModelShape("llama", 4096, 14336, 32, 8, 128, 128256),
    "Qwen3-8B": ModelShape("qwen3", 4096, 12288, 32, 8, 128, 151936, qk_norm=True),
    "Gemma-3-12B": ModelShape(
        "gemma3_text", 3840, 15360, 16, 8, 256, 262208, qk_norm=True, weight_offset=1.0
    ),
    "Mistral-7B": ModelShape("mistral", 4096, 14336, 32, 8, 128, 32768),
}
TRAINED = {  # on words of source code; a step takes a GPU some 25 ms
    "LLaMA": ModelShape("llama", 1024, 2816, 16, 4, 64, 32768),
    "Qwen3": ModelShape("qwen3", 1024, 3072, 16, 8, 128, 32768, qk_norm=True),
}
# for a trial of the command
TINY = {"tiny": ModelShape("qwen3", 64, 96, 4, 2, 16, 128, qk_norm=True)}
