"""A checkpoint and its conversion with inputs for both, as `verify_draft` compares them;
module by module if memory does not hold both.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from ...verification.context import TOKENS as RANDOM_TOKENS
from ...verification.context import (
    default_inputs,
    in_dtype_of,
    max_positions,
)
from ...verification.runs import outputs_of
from ..checkpoint.source import Checkpoint
from ..loading import load, tokenizer_of
from ..options import ConversionOptions

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


@contextmanager
def side_by_side(
    source: Checkpoint, draft: Path, options: ConversionOptions
) -> Iterator[tuple]:
    """Load two checkpoints in their own dtype. If memory does not hold both, the
    weights of a module are read when it runs.

    Returns:
        (original model, converted model, keyword arguments of their forward, a batch
        each; a description of the runs, for people).
    """
    size = sum(tensor.nbytes for tensor in source.tensors.values())
    free = psutil.virtual_memory().available
    is_few = size >= LARGE and options.verify != "full"
    run_on = "side by side"
    kwargs: dict = {}
    with tempfile.TemporaryDirectory() as scratch:
        if size * _IN_FLOAT64 > 0.8 * free:
            is_few = True
            run_on += ", module by module"
            kwargs = {
                "device_map": "auto",
                "max_memory": {"cpu": int(_FOR_EACH * free)},
            }
            kwargs["offload_folder"] = scratch
        original, _ = load(source.folder, options, **kwargs)
        result, _ = load(draft, options, **kwargs)
        if original.dtype == torch.float64 and not kwargs:
            # which has no wider run to compare with
            original = original.float()
            result = result.float()
        if is_few and not options.inputs:
            run_on += f", on {FEW_TOKENS} tokens as they are large"
        inputs = _batches(source.folder, original, options, is_few)
        yield original, result, inputs, run_on


def _batches(
    folder: Path, model, options: ConversionOptions, is_few: bool
) -> list[dict]:
    """The inputs that the models are run on: the caller's, texts, or random ones."""
    if options.inputs:
        return [in_dtype_of(model, options.inputs(model))]
    tokenizer = tokenizer_of(folder, model, options)
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
