"""A checkpoint and its conversion, run on the same inputs; module by module if memory
does not hold both.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers import AutoTokenizer

from ...verification.context import TOKENS as RANDOM_TOKENS
from ...verification.context import (
    default_inputs,
    in_dtype_of,
    max_positions,
    one_line,
)
from ...verification.runs import outputs_of
from ..checkpoint.source import open_checkpoint
from ..options import ConversionOptions
from ..plan import ConversionError
from ..proxy.model import config_and_class
from ..proxy.run import loaded

PROMPTS = (
    "The following table lists the statements that may be used in a function.",
    "An expression is evaluated before the result is bound to a name; if it raises an exception, the name keeps the "
    "value that it had.",
)
TOKENS = 64
SHORT = 8
# output values of a comparison: from a few logits the source's own error cannot be
# estimated
ENOUGH = 128
# bytes of weights from which on a few tokens are run, unless all is asked for
LARGE = 2**28
FEW_TOKENS = 16
# two models, and the widest weights of a run in float64, in sizes of the checkpoint
_IN_FLOAT64 = 6
_FOR_EACH = 0.1  # of the free memory: weights that stay while the others are read


@dataclass
class ModelPair:
    """Two models in eval mode, and keyword arguments of their forward, a batch each."""

    source: torch.nn.Module
    result: torch.nn.Module
    inputs: list[dict]
    run_on: str  # a description of the runs, for people


@contextmanager
def side_by_side(
    src: Path, folder: Path, options: ConversionOptions
) -> Iterator[ModelPair]:
    """Load two checkpoints in their own dtype. If memory does not hold both, the
    weights of a module are read when it runs.
    """
    tensors = open_checkpoint(src, allow_pickle=True).tensors
    size = sum(tensor.nbytes for tensor in tensors.values())
    free = psutil.virtual_memory().available
    is_few = size >= LARGE and options.verify != "full"
    run_on = "side by side"
    how: dict = {}
    with tempfile.TemporaryDirectory() as scratch:
        if size * _IN_FLOAT64 > 0.8 * free:
            is_few = True
            run_on += ", module by module"
            how = {"device_map": "auto", "max_memory": {"cpu": int(_FOR_EACH * free)}}
            how["offload_folder"] = scratch
        source, _ = _load(src, options, **how)
        result, _ = _load(folder, options, **how)
        if source.dtype == torch.float64 and not how:
            # which has no wider run to compare with
            source = source.float()
            result = result.float()
        if is_few and not options.inputs:
            run_on += f", on {FEW_TOKENS} tokens as they are large"
        yield ModelPair(source, result, _batches(src, source, options, is_few), run_on)


def _load(folder: Path, options: ConversionOptions, **how) -> tuple:
    """As `loaded`, in the checkpoint's own dtype."""
    how |= {"dtype": "auto", "trust_remote_code": options.trust_remote_code}
    return loaded(class_of(folder, options), folder, **how)


def class_of(folder: Path, options: ConversionOptions) -> type:
    """The class that a folder is loaded with."""
    how = options.trust_remote_code, options.model_class
    return config_and_class(folder, *how, trained=True)[1]


def _batches(src: Path, model, options: ConversionOptions, is_few: bool) -> list[dict]:
    """The inputs that the models are run on: the caller's, texts, or random ones."""
    if options.inputs:
        return [in_dtype_of(model, options.inputs(model))]
    tokenizer = tokenizer_of(src, model, options)
    texts = () if tokenizer is None else options.prompts or PROMPTS
    rows, length = (1, FEW_TOKENS) if is_few else (len(texts), TOKENS)
    length = min(length, max_positions(model.config))
    ids = [tokenizer(text, return_tensors="pt").input_ids for text in texts[:rows]]
    batches = [{"input_ids": row[:, :length]} for row in ids if row.numel()]
    if not batches:
        size = (1, FEW_TOKENS) if is_few else RANDOM_TOKENS
        batches = [_random(model, size)]
    if min(output.numel() for output in outputs_of(model, batches)) < ENOUGH:
        batches.append(_random(model, (ENOUGH, SHORT)))
    return batches


def _random(model, size: tuple[int, int]) -> dict:
    return in_dtype_of(model, default_inputs(model, size))


def tokenizer_of(src: Path, model, options: ConversionOptions):
    """The tokenizer of a folder, for a model or class that takes token ids; None if
    there is none.
    """
    if model.main_input_name != "input_ids" or not any(src.glob("*token*")):
        return None
    trusted = bool(options.trust_remote_code)
    try:
        return AutoTokenizer.from_pretrained(src, trust_remote_code=trusted)
    except Exception as error:  # a tokenizer's own code may raise anything
        raise ConversionError(
            f"{src}: its tokenizer does not load: pass trust_remote_code=True if it "
            f"brings code, or verify=False ({one_line(error)})"
        ) from error


def missing_parameters(src: Path, options: ConversionOptions) -> list[str]:
    """Parameters of the model that the checkpoint lacks, found without reading values;
    refused if a shape differs.
    """
    cls = class_of(src, options)
    try:
        _, info = _load(src, options, device_map="meta", ignore_mismatched_sizes=True)
    except Exception as error:  # a model's own code may raise anything
        raise ConversionError(
            f"{src}: {cls.__name__} does not load it: repair the folder, or pass the "
            f"model_class that it was saved from ({one_line(error)})"
        ) from error
    for key, stored, wanted in sorted(info["mismatched_keys"]):
        raise ConversionError(
            f"{src}: {key} has shape {[*stored]} in the checkpoint, and {[*wanted]} by "
            "its config.json: one of the two is of another model"
        )
    return sorted(info["missing_keys"])
