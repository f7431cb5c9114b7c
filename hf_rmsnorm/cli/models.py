"""From a source to a model: its config, its weights, its tokenizer."""

import os
import sys
from pathlib import Path

from ..sources import Location, loading, without_weights
from .common import CliError, one_line

# Tried in this order where the config names no class of transformers.
AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
)


def _config_and_class(source: Location):
    """The config, and the class of the saved model if transformers has it; else an auto
    class.
    """
    import transformers

    with loading(source, "the config"):
        config = transformers.AutoConfig.from_pretrained(source.where, **source.kwargs)
    remote = getattr(config, "auto_map", None) or {}
    for name in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, name, None)
        if cls is not None and not remote:
            return config, cls
    for name in AUTO_CLASSES:
        cls = getattr(transformers, name)
        if type(config) in cls._model_mapping or name in remote:
            return config, cls
    return config, transformers.AutoModel


def empty_model(source: Location):
    """The model's modules without their weights: on the meta device, so that the size
    does not matter.
    """
    config, cls = _config_and_class(source)

    def make():
        if hasattr(cls, "from_config"):  # an auto class
            trusted = source.trust_remote_code
            return cls.from_config(config, trust_remote_code=trusted)
        return cls(config)

    with loading(source, "the modules"):
        return without_weights(make).eval()


def load_model(source: Location, dtype: str, device):
    """A model with its weights, in evaluation mode."""
    _, cls = _config_and_class(source)
    with loading(source, "the weights"):
        model = cls.from_pretrained(source.where, dtype=dtype, **source.kwargs)
        return model.to(device).eval()


def load_tokenizer(source: Location):
    """The tokenizer, or None where the checkpoint has none."""
    from transformers import AutoTokenizer

    if source.is_local:
        names = os.listdir(source.where)
        if not any("token" in name or name.startswith("vocab") for name in names):
            return None
    with loading(source, "the tokenizer"):
        return AutoTokenizer.from_pretrained(source.where, **source.kwargs)


def help_texts() -> str:
    """Python's help texts: a long text that is on every machine."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def tokens(model, source: Location, limit: int, text: str | None = None):
    """Token ids of a text, by default Python's help, (1, n) on the model's device, n at
    most limit; seeded random ids without a tokenizer.
    """
    import torch

    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        vocabulary = model.config.get_text_config().vocab_size
        seeded = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (1, limit), generator=seeded)
    else:
        text = help_texts() if text is None else text
        # No token is as long as that, and tokenizers take their time over a whole book.
        ids = tokenizer(text[: 40 * limit], return_tensors="pt").input_ids[:, :limit]
    if ids.shape[1] == 0:
        raise CliError("the prompt has no tokens: pass some text with --prompt")
    return ids.to(model.device)


def read_tensors(file: Path) -> dict:
    """The tensors of a safetensors file, by name."""
    from safetensors.torch import load_file

    cure = "pass a .safetensors file of the arguments of the model's forward, by name"
    try:
        inputs = load_file(file)
    except Exception as error:  # of safetensors or of the system
        raise CliError(f"cannot read {file}: {one_line(error, 200)}; {cure}") from error
    if not inputs:
        raise CliError(f"{file} holds no tensors: {cure}")
    return inputs


def quieten():
    """Turn off progress bars and advice of transformers; downloads still show a bar."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from huggingface_hub import constants
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()  # and those of downloads
    if sys.stderr.isatty() and not constants.HF_HUB_DISABLE_PROGRESS_BARS:
        enable_progress_bars()
