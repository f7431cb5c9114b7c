"""Which models can be compared, and the inputs that both are run on."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .context import default_inputs, evaluating, in_dtype_of
from .pictures import with_picture


def checked_inputs(
    reference: nn.Module,
    candidate: nn.Module,
    inputs,
    new_tokens: int,
    same_parameters: bool,
) -> list[dict]:
    """The keyword arguments of each call of the models, on their device, once both are
    known to be comparable.

    Raises:
        TypeError, ValueError: as `verify_equivalence`.
    """
    for model in (reference, candidate):
        _require_weights(model)
    vocabulary, others = vocabulary_of(reference), vocabulary_of(candidate)
    if vocabulary != others:
        words = f"{vocabulary} words in the reference, {others} in the candidate"
        raise ValueError(
            f"the vocabularies differ: {words}; compare models that share a tokenizer"
        )
    device, other = device_of(reference), device_of(candidate)
    if device != other:
        raise ValueError(
            f"the reference is on {device} and the candidate on {other}: move one with .to({device!s})"
        )
    if same_parameters:
        _require_same_parameters(reference, candidate)
    if inputs is None:
        inputs = _default_batches(reference, new_tokens)
    return _batches(inputs, vocabulary, device)


def _default_batches(model: nn.Module, new_tokens: int) -> list[dict]:
    """Random inputs; for a model that takes pictures among its tokens, also a text with
    one.
    """
    inputs = in_dtype_of(model, default_inputs(model, new_tokens=new_tokens))
    on_device = {
        name: t.to(device_of(model)) if isinstance(t, torch.Tensor) else t
        for name, t in inputs.items()
    }
    with evaluating(model):
        picture = with_picture(model, on_device)
    return [inputs] if picture is None else [inputs, picture]


def _require_weights(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"verify_equivalence needs loaded models, got {type(model).__name__}: load it first"
        )
    if device_of(model).type == "meta":
        raise ValueError(
            f"{type(model).__name__} is on the meta device and has no weights: load it with weights"
        )


def _require_same_parameters(reference: nn.Module, candidate: nn.Module) -> None:
    ours, theirs = (
        {name: tuple(p.shape) for name, p in m.named_parameters()}
        for m in (reference, candidate)
    )
    for name in (*ours, *theirs):
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"the architectures differ: {name} is {ours.get(name, 'missing')} in the reference "
                f"({type(reference).__name__}) and {theirs.get(name, 'missing')} in the candidate "
                f"({type(candidate).__name__}); pass norms=False to compare logits and generation alone"
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


def vocabulary_of(model: nn.Module) -> int | None:
    """How many token ids a model knows; None where it reads no tokens."""
    try:
        embedding = (
            model.get_input_embeddings()
            if hasattr(model, "get_input_embeddings")
            else None
        )
    except NotImplementedError:  # it reads images or audio
        return None
    weight = getattr(embedding, "weight", None)
    return None if weight is None else weight.shape[0]


def _batches(inputs, vocabulary: int | None, device: torch.device) -> list[dict]:
    if isinstance(inputs, (torch.Tensor, Mapping)):
        inputs = [inputs]
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        raise TypeError(
            f"inputs is {type(inputs).__name__}: pass token ids or what a tokenizer returns for the text"
        )
    batches = [
        _batch(f"inputs[{i}]", arguments, vocabulary, device)
        for i, arguments in enumerate(inputs)
    ]
    if not any(
        isinstance(value, torch.Tensor) for batch in batches for value in batch.values()
    ):
        raise ValueError("inputs are empty: pass at least one token")
    return batches


def _batch(name: str, arguments, vocabulary: int | None, device: torch.device) -> dict:
    """Keyword arguments of one call, without labels; `name` is what errors call it."""
    if not isinstance(arguments, (torch.Tensor, Mapping)):
        raise TypeError(
            f"{name} is {type(arguments).__name__}: pass token ids or a dict of tensors"
        )
    if isinstance(arguments, torch.Tensor):
        arguments = {"input_ids": arguments}
    batch = {}
    for key, value in arguments.items():
        if key == "labels":
            continue
        if isinstance(value, torch.Tensor):
            value = value.to(device)
            if value.numel() == 0:
                raise ValueError(
                    f"{name} is empty: {key} has shape {tuple(value.shape)}; pass tokens"
                )
        batch[key] = value
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
