"""Text from MODEL before and after the patch, with tokens per second for both.

Decoding is greedy, so that the two texts can be compared token by token.
"""

from __future__ import annotations

import time

from . import models
from .common import DTYPES, CliError, Result, add_device, add_globs, add_model, interpret_on_cpu, pick_device, positive


def add_arguments(parser) -> None:
    add_model(parser)
    parser.add_argument("--prompt", required=True, help="the text to go on from")
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="how many tokens (default 64)")
    parser.add_argument("--dtype", choices=DTYPES, help="the weights' dtype (default: as stored)")
    add_device(parser)
    parser.add_argument(
        "--interpret", action="store_true", help="without a GPU, run the kernels in Triton's interpreter (slow)"
    )
    add_globs(parser)


def run(args) -> Result:
    source = models.find(args.model, args.trust_remote_code)
    device = pick_device(args.device)
    if args.interpret:
        interpret_on_cpu(device)
    models.quieten()
    from .. import patched
    from ..ops.backend import describe_backend

    config = models.load_config(source)
    tokenizer = models.load_tokenizer(source)
    if tokenizer is None:
        raise CliError(f"{source.name} has no tokenizer to read a prompt with: pass a folder that has one")
    model = models.load_model(source, config, DTYPES.get(args.dtype, "auto"), device)
    if not model.can_generate():
        raise CliError(f"{source.name} is a {type(model).__name__}, which does not generate text: pass a causal LM")
    ids = models.tokens(model, tokenizer, args.prompt, None)

    before = _generate(model, tokenizer, ids, args.max_new_tokens)
    with patched(model, include=args.include, exclude=args.exclude) as report:
        after = _generate(model, tokenizer, ids, args.max_new_tokens)
    different = first_difference(before["token_ids"], after["token_ids"])

    backend, reason = describe_backend(device)
    data = {
        "model": source.name,
        "prompt": args.prompt,
        "device": str(device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": backend,
        "backend_reason": reason,
        "swapped": len(report.swapped),
        "unpatched": before,
        "patched": after,
        "same_tokens": different is None,
        "first_difference": different,
    }
    return Result(data, _text(data))


def greedy(model, ids, max_new_tokens: int, **more) -> list[int]:
    """The likeliest tokens behind `ids` (1, n); `more` arguments of the model's ``generate``."""
    import torch

    # Everything that says how to sample is overruled: the generation_config may ask for it.
    how = dict(do_sample=False, num_beams=1, temperature=None, top_p=None, top_k=None, pad_token_id=0, **more)
    how |= dict(attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens)
    return model.generate(ids, **how)[0, ids.shape[1] :].tolist()  # tolist() waits for the device


def _generate(model, tokenizer, ids, max_new_tokens: int) -> dict:
    greedy(model, ids, 4)  # compiles the kernels, fills caches
    start = time.perf_counter()
    new = greedy(model, ids, max_new_tokens)
    seconds = time.perf_counter() - start
    return {
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "token_ids": new,
        "seconds": seconds,
        "tokens_per_second": len(new) / seconds,
    }


def first_difference(a: list[int], b: list[int]) -> int | None:
    """The first index at which two token lists differ, or None where they are equal."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _text(data: dict) -> str:
    before, after = data["unpatched"], data["patched"]
    lines = [f"{data['model']}: {data['swapped']} norms patched, {data['dtype']} on {data['device']}"]
    for name, side in (("before the patch", before), ("after the patch", after)):
        lines += ["", f"--- {name}: {len(side['token_ids'])} tokens, {side['tokens_per_second']:.1f} per second"]
        lines += [data["prompt"] + side["text"]]
    lines.append("")
    if data["same_tokens"]:
        lines.append(f"Same tokens: all {len(after['token_ids'])} are equal.")
    else:
        lines.append(f"The tokens differ from new token {data['first_difference']} on.")
    lines.append(f"Backend {data['backend']}: {data['backend_reason']}.")
    if data["device"] == "cpu":
        lines.append("The two speeds say nothing about the kernels: those need a GPU to be fast.")
    return "\n".join(lines)
