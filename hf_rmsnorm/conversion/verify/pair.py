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
SOME = 16  # pictures and texts: as many scores as their square
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
    """Load two checkpoints in their own dtype, module by module if memory does not hold
    both.
    """
    tensors = open_checkpoint(src, allow_pickle=True).tensors
    size = sum(tensor.nbytes for tensor in tensors.values())
    free = psutil.virtual_memory().available
    is_streamed = size * _IN_FLOAT64 > 0.8 * free
    is_whole = not is_streamed and (options.verify == "full" or size < LARGE)
    how: dict = {}
    run_on = "side by side"
    with tempfile.TemporaryDirectory() as scratch:
        if is_streamed:
            run_on += ", module by module"
            if not options.inputs:
                run_on += f", on {FEW_TOKENS} tokens"
            how = {"device_map": "auto", "max_memory": {"cpu": int(_FOR_EACH * free)}}
            how["offload_folder"] = scratch
        elif not (is_whole or options.inputs):
            run_on += (
                f", on {FEW_TOKENS} tokens as they are large (verify='full' runs all)"
            )
        source, _ = _load(src, options, **how)
        result, _ = _load(folder, options, **how)
        # A float64 model has no wider run to compare with, and parts of its forward may
        # stay in float32.
        if source.dtype == torch.float64 and not is_streamed:
            source = source.float()
            result = result.float()
        batches = _batches(src, source, options, is_whole)
        yield ModelPair(source, result, batches, run_on)


def _load(folder: Path, options: ConversionOptions, **how) -> tuple:
    """As `loaded`, in the checkpoint's own dtype."""
    how |= {"dtype": "auto", "trust_remote_code": options.trust_remote_code}
    return loaded(class_of(folder, options), folder, **how)


def class_of(folder: Path, options: ConversionOptions) -> type:
    """The class that a folder is loaded with."""
    how = options.trust_remote_code, options.model_class
    return config_and_class(folder, *how, trained=True)[1]


def _batches(
    src: Path, model, options: ConversionOptions, is_whole: bool
) -> list[dict]:
    """The inputs that the models are run on: the caller's, texts, or random ones; a few
    tokens of these if it is not to be all.
    """
    if options.inputs:
        return [in_dtype_of(model, options.inputs(model))]
    tokenizer = tokenizer_of(src, model, options)
    texts = () if tokenizer is None else options.prompts or PROMPTS
    size = RANDOM_TOKENS
    most = min(TOKENS, max_positions(model.config))
    if not is_whole:
        texts = texts[:1]
        size = 1, FEW_TOKENS
        most = min(FEW_TOKENS, most)
    rows = [tokenizer(text, return_tensors="pt").input_ids[:, :most] for text in texts]
    batches = [{"input_ids": ids} for ids in rows if ids.numel()]
    batches = batches or [in_dtype_of(model, default_inputs(model, size))]
    sizes = [output.numel() for output in outputs_of(model, batches)]
    if sizes and min(sizes) < ENOUGH:
        rows = ENOUGH if sum(sizes) < ENOUGH else SOME
        more = default_inputs(model, (rows, SHORT))
        batches.append(in_dtype_of(model, more))
    return batches


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
