"""Which models can be compared, and the inputs that both are run on: what
`verify_equivalence` checks first.
"""

from collections.abc import Mapping

import torch
from accelerate.utils import send_to_device
from torch import nn

from ..patching.api import check_module
from .context import default_inputs, evaluating, in_dtype_of
from .pictures import with_picture


def checked_inputs(
    reference: nn.Module, candidate: nn.Module, inputs, new_tokens: int
) -> list[dict]:
    """The keyword arguments of each call of the models, on their device, once both are
    known to be comparable.

    Raises:
        TypeError, ValueError: as `verify_equivalence`.
    """
    for model in (reference, candidate):
        check_module("verify_equivalence", model)
        device = device_of(model)
    vocabulary = _vocabulary_of(reference)
    others = _vocabulary_of(candidate)
    if vocabulary != others:
        raise ValueError(
            f"the vocabularies differ: {vocabulary} words in the reference, {others} "
            "in the candidate; compare models that share a tokenizer"
        )
    if inputs is None:
        return _default_batches(reference, new_tokens)
    if not isinstance(inputs, (list, tuple)):
        inputs = [inputs]
    batches = [
        _batch(f"inputs[{number}]", arguments, vocabulary, device)
        for number, arguments in enumerate(inputs)
    ]
    if not any(batches):
        raise ValueError("inputs are empty: pass at least one token")
    return batches


def _default_batches(model: nn.Module, new_tokens: int) -> list[dict]:
    """Random inputs; for a model that takes pictures among its tokens, also a text with
    one.
    """
    inputs = in_dtype_of(model, default_inputs(model, new_tokens=new_tokens))
    inputs = send_to_device(inputs, device_of(model))
    with evaluating(model):
        picture = with_picture(model, inputs)
    return [inputs] if picture is None else [inputs, picture]


def device_of(model: nn.Module) -> torch.device:
    """Of the first parameter that is not offloaded; the CPU if accelerate offloads them
    all.
    """
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    if hasattr(model, "hf_device_map") or hasattr(model, "_hf_hook"):
        return torch.device("cpu")
    raise ValueError(f"{type(model).__name__} has no weights: load it with weights")


def _vocabulary_of(model: nn.Module) -> int | None:
    """How many token ids a model knows; None where it reads no tokens."""
    try:
        return model.get_input_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):  # it reads images or audio
        return None


def _batch(name: str, arguments, vocabulary: int | None, device: torch.device) -> dict:
    """Keyword arguments of one call, without labels; `name` is what errors call it."""
    if isinstance(arguments, torch.Tensor):
        arguments = {"input_ids": arguments}
    if not isinstance(arguments, Mapping):
        raise TypeError(
            f"{name} is {type(arguments).__name__}: pass token ids or what a tokenizer "
            "returns for the text"
        )
    batch = send_to_device(dict(arguments), device)
    batch.pop("labels", None)
    ids = batch.get("input_ids")
    if ids is None:
        return batch
    if ids.is_floating_point() or ids.dim() not in (1, 2) or not ids.numel():
        raise ValueError(
            f"{name}: input_ids is {ids.dtype} of shape {tuple(ids.shape)}; pass "
            "integers (batch, tokens), at least one"
        )
    least = ids.min().item()
    most = ids.max().item()
    if vocabulary is not None and (least < 0 or most >= vocabulary):
        raise ValueError(
            f"{name}: token ids from {least} to {most} where the model knows 0 to "
            f"{vocabulary - 1}; use its own tokenizer"
        )
    batch["input_ids"] = torch.atleast_2d(ids)
    return batch
