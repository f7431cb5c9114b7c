"""Tiny post-norm models of every kind the tests speak of, with weights as training
leaves them: no mean is zero.
"""

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

from hf_rmsnorm.conversion.proxy.model import give_weights, with_settings

_SIZES = {"vocab_size": 128, "max_position_embeddings": 64}
BERT = {
    **_SIZES, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 72,
}  # fmt: skip
BART = {
    **_SIZES, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 72,
    "decoder_ffn_dim": 96,
}  # fmt: skip
OPT = {
    **_SIZES, "hidden_size": 48, "word_embed_proj_dim": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "ffn_dim": 72, "do_layer_norm_before": False,
}  # fmt: skip
# name -> (auto class, model_type, config, norms that `exact` makes RMSNorms, norms,
# keys of the FFN width)
KINDS = {
    "bert": (AutoModel, "bert", BERT, 3, 5, ["intermediate_size"]),
    "roberta": (AutoModelForMaskedLM, "roberta", BERT, 3, 6, ["intermediate_size"]),
    "distilbert": (
        AutoModel,
        "distilbert",
        {**_SIZES, "dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 72},
        3,
        5,
        ["hidden_dim"],
    ),
    "bart": (
        AutoModelForSeq2SeqLM,
        "bart",
        BART,
        6,
        12,
        ["decoder_ffn_dim", "encoder_ffn_dim"],
    ),
    "opt-350m": (AutoModelForCausalLM, "opt", OPT, 2, 4, ["ffn_dim"]),
    "albert": (
        AutoModel,
        "albert",
        {**BERT, "embedding_size": 24},
        2,
        3,
        ["intermediate_size"],
    ),
}


def build(kind, dtype=torch.float64, seed=0, **config):
    """A tiny model in eval mode, the same for the same arguments; the global generator
    is left as it was.

    Args:
        kind: a key of `KINDS`.
        config: changes to its configuration, for example ``hidden_act="silu"``.
    """
    auto, model_type, sizes, *_ = KINDS[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokens = {
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
        }
        model = auto.from_config(
            AutoConfig.for_model(model_type, **{**sizes, **tokens, **config}),
            dtype=torch.float64,
        )
    give_weights(model, seed)
    return model.to(dtype).eval()


def batch(model, seed=0, rows=4, length=20):
    """Random token ids and a mask with padding, for both stacks where there are two."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 128, (rows, length), generator=generator)
    mask = (
        torch.arange(length)
        < torch.tensor([length, *[length - 3] * (rows - 1)])[:, None]
    ).long()
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.flip(0)[:, : length - 5]
    return inputs


def built(conversion, model):
    """What a conversion of this model loads as, in the model's class and dtype."""
    how = {
        "config": with_settings(model.config, conversion.config),
        "dtype": model.dtype,
    }
    return (
        type(model)
        .from_pretrained(None, state_dict=dict(conversion.tensors), **how)
        .eval()
    )
