"""Which models can be compared, and the inputs that both are run on."""

from collections.abc import Mapping

import torch
from torch import nn

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
        _require_weights(model)
    vocabulary, others = _vocabulary_of(reference), _vocabulary_of(candidate)
    if vocabulary != others:
        words = f"{vocabulary} words in the reference, {others} in the candidate"
        raise ValueError(
            f"the vocabularies differ: {words}; compare models that share a tokenizer"
        )
    device = device_of(reference)
    if inputs is None:
        inputs = _default_batches(reference, new_tokens)
    elif not isinstance(inputs, (list, tuple)):
        inputs = [inputs]
    batches = [
        _batch(f"inputs[{i}]", arguments, vocabulary, device)
        for i, arguments in enumerate(inputs)
    ]
    if not any(batches):
        raise ValueError("inputs are empty: pass at least one token")
    return batches


def _default_batches(model: nn.Module, new_tokens: int) -> list[dict]:
    """Random inputs; for a model that takes pictures among its tokens, also a text with
    one.
    """
    inputs = in_dtype_of(model, default_inputs(model, new_tokens=new_tokens))
    inputs = _on(device_of(model), inputs)
    with evaluating(model):
        picture = with_picture(model, inputs)
    return [inputs] if picture is None else [inputs, picture]


def _on(device: torch.device, arguments: Mapping) -> dict:
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def _require_weights(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"verify_equivalence needs loaded models, got {type(model).__name__}: load it first"
        )
    if device_of(model).type == "meta":
        raise ValueError(
            f"{type(model).__name__} is on the meta device and has no weights: load it with weights"
        )


def first_parameter(model: nn.Module) -> torch.Tensor:
    """The model's first parameter; a ValueError where it has none."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ValueError(f"{type(model).__name__} has no parameters: nothing to verify")
    return parameter


def device_of(model: nn.Module) -> torch.device:
    """Of the first parameter that is not offloaded; the CPU if accelerate offloads them
    all.
    """
    first = first_parameter(model).device
    device = next((p.device for p in model.parameters() if not p.is_meta), first)
    offloaded = hasattr(model, "hf_device_map") or hasattr(model, "_hf_hook")
    return torch.device("cpu") if device.type == "meta" and offloaded else device


def _vocabulary_of(model: nn.Module) -> int | None:
    """How many token ids a model knows; None where it reads no tokens."""
    try:
        weight = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):  # it reads images or audio
        return None
    return weight.shape[0]


def _batch(name: str, arguments, vocabulary: int | None, device: torch.device) -> dict:
    """Keyword arguments of one call, without labels; `name` is what errors call it."""
    if isinstance(arguments, torch.Tensor):
        arguments = {"input_ids": arguments}
    if not isinstance(arguments, Mapping):
        raise TypeError(
            f"{name} is {type(arguments).__name__}: pass token ids or what a tokenizer returns for the text"
        )
    batch = _on(device, arguments)
    batch.pop("labels", None)
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and value.numel() == 0:
            raise ValueError(
                f"{name} is empty: {key} has shape {tuple(value.shape)}; pass tokens"
            )
    ids = batch.get("input_ids")
    if ids is not None:
        _require_ids(name, ids, vocabulary)
        batch["input_ids"] = torch.atleast_2d(ids)
    return batch


def _require_ids(name: str, ids: torch.Tensor, vocabulary: int | None) -> None:
    if ids.is_floating_point() or ids.dim() not in (1, 2):
        kind = f"{ids.dtype} of shape {tuple(ids.shape)}"
        raise ValueError(f"{name}: input_ids is {kind}; pass integers (batch, tokens)")
    if vocabulary is not None and not 0 <= ids.min() <= ids.max() < vocabulary:
        where = f"token ids from {ids.min()} to {ids.max()} where the model knows 0 to {vocabulary - 1}"
        raise ValueError(f"{name}: {where}; use its own tokenizer")
