"""Tiny random models of every family the tests speak of, with norm weights as a trained
model has them: not ones.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_rmsnorm import convert_checkpoint
from hf_rmsnorm.patching.swap import fused_part

_TOKENS = {
    "vocab_size": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
# model_type of Transformers -> what its configuration needs besides the common sizes
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {},
    "olmo2": {},
    "gpt2": {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 96,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
# For phi3: other frequencies of rotation beyond 32 tokens, as Phi-3-128k, Phi-3.5 and
# Phi-4-mini have beyond 4096.
LONGROPE = {
    "original_max_position_embeddings": 32,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    },
}


def converted(family, folder):
    """Folder of a tiny model of the family, converted to RMSNorm."""
    build(family).save_pretrained(folder / "source")
    convert_checkpoint(folder / "source", folder / "converted", verify=False)
    return folder / "converted"


def build(family, dtype=torch.float32, seed=0, **config):
    """A tiny causal LM in eval mode, the same for the same arguments; the global
    generator is left as it was.

    Args:
        family: a key of `FAMILIES`, or another causal type whose configuration `config`
            gives in full.
        dtype: of all parameters.
        config: changes to its configuration, for example ``num_hidden_layers=4``.
    """
    sizes = _SIZES
    if family == "gpt2":
        sizes = {}
    options = _TOKENS | sizes | FAMILIES.get(family, {}) | config
    config = AutoConfig.for_model(family, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        train_norms(model)
    return model.to(dtype).eval()


def train_norms(model):
    """Spread the weights and biases of norms as training does."""
    with torch.no_grad():
        for _, norm in norms(model):
            for parameter in norm.parameters(recurse=False):
                parameter.add_(0.3 * torch.randn_like(parameter))


def norms(model):
    """(path, module) of every module whose class is named a norm."""
    named = model.named_modules()
    return [(path, m) for path, m in named if "Norm" in type(m).__name__]


def types(model):
    """The class of each module."""
    return [type(module) for module in model.modules()]


def gradients(model):
    """A copy of each gradient that there is, by the parameter's name."""
    named = model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def fused_norms(model):
    """The paths of the norms that a patch has swapped."""
    modules = model.named_modules()
    return [path for path, module in modules if fused_part(type(module)) is not None]


def token_ids(batch=2, length=12, seed=0):
    """(batch, length) int64 token ids that every family knows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 128, (batch, length), generator=generator)
