"""From a source to a model: its config, its weights, its tokenizer."""

import os
import sys
from pathlib import Path

from ..sources import Source, loading
from .common import CliError, one_line


def _config_and_class(source: Source):
    """The config, and the class of the saved model if transformers has it; else an auto
    class.
    """
    import transformers

    with loading(source, "the config"):
        config = transformers.AutoConfig.from_pretrained(source.where, **source.kwargs)
    remote = getattr(config, "auto_map", None) or {}
    for name in () if remote else getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
            return config, named
    for auto in (
        "AutoModelForCausalLM",
        "AutoModelForImageTextToText",
        "AutoModelForSeq2SeqLM",
    ):
        cls = getattr(transformers, auto)
        if type(config) in cls._model_mapping or auto in remote:
            return config, cls
    return config, transformers.AutoModel


def empty_model(source: Source):
    """The model's modules without their weights: on the meta device, so that the size
    does not matter.
    """
    from accelerate import init_empty_weights

    config, cls = _config_and_class(source)
    with loading(source, "the modules"), init_empty_weights():
        if hasattr(cls, "from_config"):  # an auto class
            return cls.from_config(
                config, trust_remote_code=source.trust_remote_code
            ).eval()
        return cls(config).eval()


def load_model(source: Source, dtype: str, device, instead: str = ""):
    """A model with its weights, in evaluation mode; `instead` is the cure if it takes
    no text.
    """
    _, cls = _config_and_class(source)
    with loading(source, "the weights", weights=True):
        model = (
            cls.from_pretrained(source.where, dtype=dtype, **source.kwargs)
            .to(device)
            .eval()
        )
    if instead and (takes := model.main_input_name) != "input_ids":
        raise CliError(
            f"{source.name} is a {type(model).__name__}, which takes {takes} and not a text: {instead}"
        )
    return model


def load_tokenizer(source: Source):
    """The tokenizer, or None where the checkpoint has none."""
    from transformers import AutoTokenizer

    if source.is_local and not any(
        any(Path(source.where).glob(names)) for names in ("*token*", "vocab*")
    ):
        return None
    with loading(source, "the tokenizer"):
        return AutoTokenizer.from_pretrained(source.where, **source.kwargs)


def tokens(model, tokenizer, text: str, limit: int | None):
    """Token ids of text, (1, n) on the model's device, n at most limit; seeded random
    ids without a tokenizer.
    """
    import torch

    if tokenizer is None:
        vocabulary = model.config.get_text_config().vocab_size
        ids = torch.randint(
            vocabulary, (1, limit or 64), generator=torch.Generator().manual_seed(0)
        )
    else:
        # No token is as long as that, and tokenizers take their time over a whole book.
        ids = tokenizer(
            text[: 40 * limit] if limit else text, return_tensors="pt"
        ).input_ids[:, :limit]
        if ids.shape[1] == 0:
            raise CliError("the prompt has no tokens: pass some text with --prompt")
    return ids.to(model.device)


def other_inputs(model, file: Path | None) -> dict | None:
    """Inputs for a model that needs more than a text: the tensors of `file`, else
    random images or audio.
    """
    from ..verification.context import default_inputs, in_dtype_of

    if file is not None:
        inputs = read_tensors(file)
    else:
        try:
            inputs = default_inputs(model)
        except ValueError as error:
            raise CliError(
                str(error).replace("pass", "pass its") + " with --inputs"
            ) from error
        if not set(inputs) - {"input_ids", "decoder_input_ids", "use_cache"}:
            return None
    return in_dtype_of(model, inputs)


def read_tensors(file: Path) -> dict:
    """The tensors of a safetensors file, by name."""
    from safetensors.torch import load_file

    try:
        inputs = load_file(file)
    except Exception as error:  # of safetensors or of the system
        words = f"{one_line(error, 200)}; pass a .safetensors file of the arguments of the model's forward, by name"
        raise CliError(f"cannot read {file}: {words}") from error
    if not inputs:
        raise CliError(
            f"{file} holds no tensors: pass the arguments of the model's forward, by name"
        )
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
