"""Load a folder for a conversion: its model, its class, its tokenizer.
`convert_checkpoint` asks for the source's before it writes, `verify/` for both models.
"""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel

from ..paths import error_line
from .errors import ConversionError
from .options import ConversionOptions
from .proxy.model import config_and_class
from .proxy.run import loaded


def class_of(folder: Path, options: ConversionOptions) -> type:
    """The class that a folder is loaded with."""
    how = options.trust_remote_code, options.model_class
    return config_and_class(folder, *how, trained=True)[1]


def load(folder: Path, options: ConversionOptions, **how) -> PreTrainedModel:
    """The model of a folder, in eval mode and in the checkpoint's own dtype."""
    model, _ = _load(class_of(folder, options), folder, options, **how)
    return model


def _load(cls: type, folder: Path, options: ConversionOptions, **how) -> tuple:
    trusted = options.trust_remote_code
    return loaded(cls, folder, dtype="auto", trust_remote_code=trusted, **how)


def missing_parameters(folder: Path, options: ConversionOptions) -> list[str]:
    """Parameters of the model that the checkpoint lacks, found without reading values;
    refused if a shape differs.
    """
    cls = class_of(folder, options)
    without_values = {"device_map": "meta", "ignore_mismatched_sizes": True}
    try:
        _, info = _load(cls, folder, options, **without_values)
    except Exception as error:  # a model's own code may raise anything
        raise ConversionError(
            f"{folder}: {cls.__name__} does not load it: repair the folder, or pass the "
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
