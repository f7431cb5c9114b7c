"""How far the hidden states of two models are from a float64 run, layer by layer, for
``hf-rmsnorm verify --plot``.
"""

import torch
from torch import nn

from .calls import unpatched
from .float64 import in_float64
from .inputs import checked_inputs
from .noise import NoiseFloor, noise_floor


def errors_by_layer(
    reference: nn.Module, candidate: nn.Module | None, inputs
) -> list[NoiseFloor]:
    """The errors of both models behind each layer, which add up from layer to layer.

    Args:
        reference: a model in evaluation mode, which runs without its patch.
        candidate: another one, or None for the reference with its patch.
        inputs: as in `verify_equivalence`; the first of several is run.

    Raises:
        ValueError: the model returns no hidden states.
    """
    candidate = candidate or reference
    batch = checked_inputs(reference, candidate, inputs, 0)[0]
    ours = _hidden_states(candidate, batch)
    with unpatched(*reference.modules()):
        theirs = _hidden_states(reference, batch)
        with in_float64(reference):
            exact = _hidden_states(reference, batch)
    layers = zip(theirs, ours, exact, strict=True)
    return [noise_floor([r], [c], [y]) for r, c, y in layers]


@torch.no_grad()
def _hidden_states(model: nn.Module, batch: dict) -> tuple[torch.Tensor, ...]:
    """The hidden states behind each layer."""
    out = model(**batch, output_hidden_states=True)
    states = out.get("hidden_states") or out.get("decoder_hidden_states")
    if not states:
        raise ValueError(
            f"{type(model).__name__} returns no hidden states: leave out --plot"
        )
    return states[1:]  # the first are the embeddings
