"""Load a folder for a conversion: its model, its class, its tokenizer.
`convert_checkpoint` asks for the source's before it writes, `verify/` for both models.
"""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel

from ..paths import error_line
from .errors import ConversionError, ConversionRefused
from .options import ConversionOptions
from .proxy.model import config_of, model_class_of
from .proxy.run import loaded


def class_of(folder: Path, options: ConversionOptions) -> type:
    """The class that a folder is loaded with."""
    trusted = options.trust_remote_code
    config = config_of(folder, trusted)
    return options.model_class or model_class_of(folder, config, trusted)


def load(
    folder: Path, options: ConversionOptions, **kwargs
) -> tuple[PreTrainedModel, dict]:
    """(the model of a folder, in eval mode and in the checkpoint's own dtype; what
    Transformers says of the loading).

    Args:
        kwargs: more for `from_pretrained`.
    """
    cls = class_of(folder, options)
    trusted = options.trust_remote_code
    return loaded(cls, folder, dtype="auto", trust_remote_code=trusted, **kwargs)


def missing_parameters(folder: Path, options: ConversionOptions) -> list[str]:
    """Parameters of the model that the checkpoint lacks, found without reading values;
    refused if a shape differs.
    """
    without_values = {"device_map": "meta", "ignore_mismatched_sizes": True}
    try:
        _, info = load(folder, options, **without_values)
    except ConversionRefused:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise ConversionError(
            f"{folder}: Transformers does not load it: repair the folder, or pass the "
            f"model_class that it was saved from ({error_line(error)})"
        ) from error
    for key, stored, wanted in sorted(info["mismatched_keys"]):
        raise ConversionError(
            f"{folder}: {key} has shape {[*stored]} in the checkpoint, and {[*wanted]} by "
            "its config.json: one of the two is of another model"
        )
    return sorted(info["missing_keys"])


def tokenizer_of(folder: Path, model, options: ConversionOptions):
    """The tokenizer of a folder, for a model or class that takes token ids; None if
    there is none.
    """
    if model.main_input_name != "input_ids" or not any(folder.glob("*token*")):
        return None
    trusted = bool(options.trust_remote_code)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    except Exception as error:  # a tokenizer's own code may raise anything
        raise ConversionError(
            f"{folder}: its tokenizer does not load: pass trust_remote_code=True if it "
            f"brings code, or verify=False ({error_line(error)})"
        ) from error
