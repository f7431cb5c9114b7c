"""How far the hidden states of two models are from a float64 run, layer by layer."""

from contextlib import nullcontext

import torch
from torch import nn

from ..patching import patched
from .calls import unpatched
from .float64 import in_float64
from .inputs import checked_inputs
from .noise import NoiseFloor, noise_floor


def errors_by_layer(
    reference: nn.Module, candidate: nn.Module | None, inputs, numerics: str = "model"
) -> list[NoiseFloor]:
    """The errors of both models behind each layer, which add up from layer to layer.

    Args:
        reference, candidate, inputs, numerics: as in `verify_equivalence`; the models
            are in evaluation mode, and a reference that is patched here is not patched
            yet.

    Raises:
        ValueError: the model returns no hidden states.
    """
    batches = checked_inputs(reference, candidate or reference, inputs, 0)
    patch = nullcontext()
    if candidate is None:
        candidate = reference
        patch = patched(reference, numerics=numerics)
    with patch:
        ours = _hidden_states(candidate, batches)
    with unpatched(*reference.modules()):
        theirs = _hidden_states(reference, batches)
        with in_float64(reference):
            exact = _hidden_states(reference, batches)
    layers = zip(theirs, ours, exact, strict=True)
    return [noise_floor(*states) for states in layers]


@torch.no_grad()
def _hidden_states(model: nn.Module, batches: list[dict]) -> list[list[torch.Tensor]]:
    """Behind each layer the hidden states of every batch."""
    by_batch = []
    for batch in batches:
        out = model(**batch, output_hidden_states=True)
        states = out.get("hidden_states") or out.get("decoder_hidden_states")
        if not states:
            raise ValueError(
                f"{type(model).__name__} returns no hidden states: leave out --plot"
            )
        by_batch.append(states[1:])  # the first are the embeddings
    return [list(states) for states in zip(*by_batch, strict=True)]
