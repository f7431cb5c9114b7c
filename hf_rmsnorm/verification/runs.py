"""The outputs of a model that are compared, and the text that it generates."""

import torch
from torch import nn

from .context import GREEDY, is_float, max_positions, output_tensors
from .report import GreedyComparison, GreedyDifference


def outputs_of(
    model: nn.Module, batches: list[dict]
) -> tuple[list[torch.Tensor], bool]:
    """(the outputs to compare, as rows that the attention mask keeps; whether they are
    logits).
    """
    rows, are_logits = [], False
    for batch in batches:
        with torch.no_grad():
            out = model(**batch)
        logits = getattr(out, "logits", None)
        are_logits = is_float(logits)
        compared = _compared(out)
        if not compared:
            raise ValueError(
                f"{type(model).__name__} returns no logits and no hidden state: nothing can be compared"
            )
        mask = batch.get("attention_mask")
        for y in compared:
            masked = mask is not None and y.dim() == 3 and mask.shape == y.shape[:2]
            rows.append(y[mask.bool()] if masked else y.reshape(-1, y.shape[-1]))
    return rows, are_logits


def _compared(out) -> list[torch.Tensor]:
    """The tensors to compare among the outputs of a model."""
    if hasattr(out, "logits_per_image"):
        # products of these, and so few that their largest error is chance
        return [out.text_embeds, out.image_embeds]
    if is_float(getattr(out, "logits", None)):
        return [out.logits]
    return [y for y in output_tensors(out) if y.dim()]


def generate(
    model: nn.Module, batch: dict, max_new_tokens: int
) -> tuple[torch.Tensor, torch.Tensor] | str:
    """New tokens (batch, steps) and the logits behind them (batch, steps, vocabulary);
    or why there are none.
    """
    if max_new_tokens <= 0:
        return "not asked for"
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return f"{type(model).__name__} does not generate"
    if "input_ids" in batch and not model.config.is_encoder_decoder:
        # every token is meant
        batch = {"attention_mask": torch.ones_like(batch["input_ids"]), **batch}
        most = max_positions(model.config)
        max_new_tokens = min(max_new_tokens, most - batch["input_ids"].shape[1])
        if max_new_tokens <= 0:
            return f"the prompt fills the {most} positions of the model"
    config = model.generation_config
    pad = (
        config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
    )
    if isinstance(pad, (list, tuple)):
        pad = pad[0]
    how = {
        "max_new_tokens": max_new_tokens,
        "pad_token_id": pad,
        "return_dict_in_generate": True,
        **GREEDY,
    }
    out = model.generate(**batch, **how, output_logits=True)
    return out.sequences[:, -len(out.logits) :], torch.stack(out.logits, 1)


def compare_greedy(
    reference: list, candidate: list, tie_margin: float
) -> GreedyComparison:
    """Compare what both models generated, as `generate` returned it for each input."""
    sequences = steps = 0
    first = None
    for index, (ours, theirs) in enumerate(zip(reference, candidate, strict=True)):
        if isinstance(ours, str):
            return GreedyComparison(0, 0, reason=ours)
        tokens, _ = ours
        sequences += len(tokens)
        steps = max(steps, tokens.shape[1])
        if first is None:
            first = _first_difference(index, ours, theirs, tie_margin)
    return GreedyComparison(sequences, steps, first)


def _first_difference(
    index: int, ours: tuple, theirs: tuple, tie_margin: float
) -> GreedyDifference | None:
    tokens, logits = ours
    others, _ = theirs
    shared = min(tokens.shape[1], others.shape[1])
    places = (tokens[:, :shared] != others[:, :shared]).nonzero().tolist()
    if not places:
        return None
    row, step = min(places, key=lambda place: place[1])
    token, other = tokens[row, step].item(), others[row, step].item()
    margin = logits[row, step, token].double() - logits[row, step, other].double()
    return GreedyDifference(index, row, step, token, other, margin.item(), tie_margin)
