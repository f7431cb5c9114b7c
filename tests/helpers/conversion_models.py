"""Tiny models with LayerNorms, and plans carried out by code of the tests' own."""

import torch
from checkpoints import in_memory
from transformers import AutoConfig, AutoModelForCausalLM

_SMALL = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA_LIKE = {
    **_SMALL, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
_GPT2_LIKE = {**_SMALL, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_BART_LIKE = {
    **_SMALL, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "max_position_embeddings": 64, "decoder_start_token_id": 1,
}  # fmt: skip
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "image_size": 16, "patch_size": 8,
}  # fmt: skip
# name -> (model_type, config)
CONFIGS = {
    "gpt2": ("gpt2", _GPT2_LIKE),
    "gpt_neox": ("gpt_neox", _LLAMA_LIKE),
    "persimmon": ("persimmon", {**_LLAMA_LIKE, "qk_layernorm": True}),
    "phimoe": (
        "phimoe",
        {**_LLAMA_LIKE, "num_local_experts": 4, "num_key_value_heads": 2},
    ),
    "blenderbot": ("blenderbot", _BART_LIKE),
    "vit": ("vit", _VISION),
}
# The same of models whose stream gets a mean from what no weight sets: a norm, an
# activation, a table.
MEAN_OF_A_MODULE = {
    "dinov2": ("dinov2", _VISION),
    "bloom": (
        "bloom",
        {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "whisper": (
        "whisper",
        {
            **_BART_LIKE,
            "architectures": ["WhisperForConditionalGeneration"],
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
        },
    ),
    "xglm": (
        "xglm",
        {**_SMALL, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    ),
}


def config_of(name, configs=CONFIGS):
    model_type, options = configs[name]
    return AutoConfig.for_model(model_type, **options)


def causal_lm(config):
    """A model in eval mode and float64, all parameters moved off what they start from,
    none with zero mean.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.mul_(3).add_(0.05 + 0.1 * noise)
    return model


def carry_out(plan, tensors):
    """The tensors of the converted checkpoint."""
    made = in_memory(plan, tensors)
    return {key: tensor.contiguous().clone() for key, tensor in made.items()}
