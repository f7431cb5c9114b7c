"""The outputs of a model that `verify_equivalence` compares, and the text that it
generates.
"""

import torch
from torch import nn

from .checks import Check, worst
from .context import GREEDY, is_float, max_positions, output_tensors


@torch.no_grad()
def outputs_of(model: nn.Module, batches: list[dict]) -> list[torch.Tensor]:
    """The outputs to compare, as rows that the attention mask keeps."""
    rows = []
    for batch in batches:
        outputs = _main_outputs(model(**batch))
        if not outputs:
            raise ValueError(
                f"{type(model).__name__} returns no logits and no hidden state: "
                "nothing can be compared, pass the model that computes them"
            )
        mask = batch.get("attention_mask")
        for y in outputs:
            if mask is not None and mask.shape == y.shape[:-1]:
                y = y[mask.bool()]
            rows.append(y.reshape(-1, y.shape[-1]))
    return rows


def _main_outputs(out) -> list[torch.Tensor]:
    """The logits that a model returned; without any, all that is no cache or loss."""
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
    most = max_positions(model.config)
    for batch in batches:
        if "input_ids" not in batch:
            return "not compared: the inputs have no token ids"
        if batch["input_ids"].shape[1] >= most:
            return f"the prompt fills the {most} positions of the model"
    return ""


def generate(
    model: nn.Module, batches: list[dict], max_new_tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each batch, new tokens (rows, steps) and the logits behind them (rows, steps,
    vocabulary).
    """
    texts = []
    for batch in batches:
        ids = batch["input_ids"]
        most = max_positions(model.config) - ids.shape[1]
        out = model.generate(
            **{"attention_mask": torch.ones_like(ids), **batch},  # every token is meant
            **GREEDY,
            max_new_tokens=min(max_new_tokens, most),
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = out.sequences[:, -len(out.logits) :]
        texts.append((tokens, torch.stack(out.logits, 1)))
    return texts


def compare_greedy(reference: list, candidate: list, tie_margin: float) -> Check:
    """Compare what both models generated, as `generate` returned it for each input:
    equal up to a tie.

    Two tokens are a tie if the original's logits prefer its own by at most
    ``tie_margin``, which the errors of both models against float64 explain.
    """
    count = sum(tokens.numel() for tokens, _ in reference)
    checks = [Check("", True, f"{count} tokens, all equal", count)]
    for (tokens, logits), (others, _) in zip(reference, candidate, strict=True):
        for row, texts in enumerate(zip(tokens.tolist(), others.tolist(), strict=True)):
            # one that stops before the other has another token there
            for step, (token, other) in enumerate(zip(*texts, strict=False)):
                if token == other:
                    continue
                scores = logits[row, step].double()
                lead = (scores[token] - scores[other]).item()
                text = (
                    f"row {row}, new token {step}: {other} instead of {token}, whose "
                    f"logit leads by {lead:.3g} (rounding explains {tie_margin:.3g})"
                )
                checks.append(Check("", lead <= tie_margin, text, count, 1))
                break  # behind it the texts differ anyway
    return worst(checks)
