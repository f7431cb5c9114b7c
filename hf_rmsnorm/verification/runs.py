"""The outputs of a model that are compared, and the text that it generates."""

import torch
from torch import nn

from .checks import Check
from .context import GREEDY, is_float, max_positions, output_tensors


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
        are_logits = is_float(getattr(out, "logits", None))
        outputs = _compared(out)
        if not outputs:
            raise ValueError(
                f"{type(model).__name__} returns no logits and no hidden state: nothing can be compared"
            )
        mask = batch.get("attention_mask")
        for y in outputs:
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


def why_not_generate(model: nn.Module, batches: list[dict], max_new_tokens: int) -> str:
    """Why a model does not continue these inputs by so many tokens; "" if it does."""
    if max_new_tokens <= 0:
        return "not asked for"
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return f"{type(model).__name__} does not generate"
    if model.config.is_encoder_decoder:
        return (
            "not compared: it would begin at the decoder's start token, not at a text"
        )
    if not all("input_ids" in batch for batch in batches):
        return "not compared: the inputs have no token ids"
    most = max_positions(model.config)
    if any(batch["input_ids"].shape[1] >= most for batch in batches):
        return f"the prompt fills the {most} positions of the model"
    return ""


def generate(
    model: nn.Module, batch: dict, max_new_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens (batch, steps) and the logits behind them (batch, steps, vocabulary)."""
    ids = batch["input_ids"]
    most = max_positions(model.config) - ids.shape[1]
    config = model.generation_config
    pad = config.eos_token_id if config.pad_token_id is None else config.pad_token_id
    options = {
        "attention_mask": torch.ones_like(ids),  # every token is meant
        **batch,
        **GREEDY,
        "max_new_tokens": min(max_new_tokens, most),
        "pad_token_id": pad[0] if isinstance(pad, (list, tuple)) else pad,
    }
    out = model.generate(**options, return_dict_in_generate=True, output_logits=True)
    return out.sequences[:, -len(out.logits) :], torch.stack(out.logits, 1)


def compare_greedy(reference: list, candidate: list, tie_margin: float) -> Check:
    """Compare what both models generated, as `generate` returned it for each input:
    equal up to a tie.

    Two tokens are a tie if the original's logits prefer its own by at most
    ``tie_margin``, which the errors of both models against float64 explain.
    """
    count = sum(tokens.numel() for tokens, _ in reference)
    differences = []
    for (tokens, logits), (others, _) in zip(reference, candidate, strict=True):
        for row, pair in enumerate(zip(tokens.tolist(), others.tolist(), strict=True)):
            steps = enumerate(zip(*pair, strict=False))
            step = next((step for step, (a, b) in steps if a != b), None)
            if step is None:
                continue
            token, other = pair[0][step], pair[1][step]
            lead = logits[row, step].double()
            margin = (lead[token] - lead[other]).item()
            what = f"row {row}, new token {step}: {other} instead of {token}"
            why = f"leads by {margin:.3g} (rounding explains {tie_margin:.3g})"
            text = f"{what}, whose logit {why}"
            differences.append(Check("", margin <= tie_margin, text, count, 1))
    lengths = [
        sum(tokens.numel() for tokens, _ in side) for side in (reference, candidate)
    ]
    if not differences and lengths[0] != lengths[1]:
        text = f"{lengths[1]} tokens instead of {lengths[0]}"
        differences.append(Check("", False, text, count, 1))
    same = Check("", True, f"{count} tokens, all equal", count)
    return min(differences, key=lambda check: check.passed, default=same)
