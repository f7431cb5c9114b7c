"""Time generation and training of MODEL on this machine, original and patched, and
compare the results.

Each figure is the median of runs that take turns. A training step is a forward and a
backward. What this machine cannot measure is listed. The exit code is 1 if the results
differ by more than rounding.
"""

import statistics
import time
from collections.abc import Iterator

from ..paths import fitted
from ..sources import find
from . import models
from .common import (
    DTYPES,
    CliError,
    Result,
    add_count,
    add_device,
    add_model,
    bar,
    pick_device,
)
from .inspect import read_text

ROUNDS = 5  # of each side
PROMPT, JUDGED = 64, 32  # tokens of the prompt; new tokens that are compared
STEADY = 1.5  # by how much the slowest of equal runs may exceed the fastest


def add_arguments(parser) -> None:
    add_model(parser)
    parser.add_argument(
        "--prompt",
        help="continue this text, and print both results (default: some text)",
    )
    add_count(parser, "--new-tokens", 64, "generate N tokens")
    add_count(parser, "--batch", 1, "train on N sequences")
    add_count(parser, "--length", 512, "of N tokens each")
    parser.add_argument(
        "--no-train", action="store_true", help="do not measure training"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="the weights' dtype (default: as stored)"
    )
    add_device(parser)


def run(args) -> Result:
    source = find(args.model, args.trust_remote_code)
    device = pick_device(args.device)
    models.quieten()
    import torch

    from .. import patch_model
    from ..ops.backend import runs_on
    from ..verification.context import max_positions

    model = models.load_model(
        source, DTYPES.get(args.dtype, "auto"), device, "time patch_model from Python"
    )
    length = min(args.length, max_positions(model.config))
    total, tokenizer = args.batch * length, models.load_tokenizer(source)
    ids = models.tokens(model, tokenizer, read_text(None), total)[0]
    batch = ids[torch.arange(total, device=ids.device) % len(ids)].view(
        args.batch, length
    )
    if args.prompt is not None and tokenizer is None:
        raise CliError(
            f"{source.name} has no tokenizer to read a prompt with: leave --prompt out"
        )

    where = runs_on(device)
    backend, reason = where["backend"], where["reason"]
    data = {"model": source.name, "device": str(device), "dtype": str(model.dtype).removeprefix("torch."),
            "backend": backend, "backend_reason": reason, "swapped": len(patch_model(model).swapped),
            "passed": True, "not_measured": []}  # fmt: skip
    if length < args.length:
        data["not_measured"].append(
            f"sequences of {args.length} tokens: the model takes at most {length}"
        )
    if backend != "triton" or "interpreter" in reason:
        data["not_measured"].append(
            f"the speed-up of the kernels, as the norms run in {reason}"
        )
    if model.can_generate() and not model.config.is_encoder_decoder:
        _generate(model, tokenizer, batch, args, data)
    else:
        data["not_measured"].append(
            f"generation: a {type(model).__name__} does not continue a text"
        )
    if not args.no_train:
        try:
            _train(model, batch, args, data)
        except torch.OutOfMemoryError:
            data["not_measured"].append(
                "a training step: out of memory; pass a smaller --batch or --length"
            )
    return Result(data, _text(data), 0 if data["passed"] else 1)


def greedy(model, ids, count: int) -> list[int]:
    """The next `count` likeliest tokens after ids (1, n), whatever the
    generation_config asks for.
    """
    from ..verification.context import GREEDY

    how = {
        "max_new_tokens": count,
        "min_new_tokens": count,
        "pad_token_id": 0,
        **GREEDY,
    }
    return model.generate(ids, attention_mask=ids.new_ones(ids.shape), **how)[
        0, ids.shape[1] :
    ].tolist()


def _generate(model, tokenizer, batch, args, data: dict) -> None:
    from torch import OutOfMemoryError

    from .. import verify_equivalence
    from ..patching.converted import conversion_of
    from ..verification.context import max_positions, prompt_length

    ids = (
        batch[:1]
        if args.prompt is None
        else models.tokens(model, tokenizer, args.prompt, None)
    )
    most = PROMPT if args.prompt is None else ids.shape[1]
    prompt = ids[:, : prompt_length(model.config, most, args.new_tokens)]
    new = min(args.new_tokens, max_positions(model.config) - prompt.shape[1])
    tokens, seconds, _ = _in_turn(
        model,
        lambda: greedy(model, prompt, new),
        bar(args, range(ROUNDS + 1), "generating"),
    )
    rates = [[new / s for s in side] for side in seconds]
    data |= {
        "new_tokens": new,
        "tokens_per_second": _figure(rates, data, "generation"),
        "token_ids": tokens,
    }
    data["first_difference"] = next(
        (i for i, (a, b) in enumerate(zip(*tokens, strict=True)) if a != b), None
    )
    if args.prompt is not None:
        data["texts"] = [
            args.prompt + tokenizer.decode(side, skip_special_tokens=True)
            for side in tokens
        ]
    unjudged = "how far the results differ: "
    if data["backend"] != "triton":
        data["not_measured"].append(
            unjudged
            + "both sides ran in plain PyTorch; hf-rmsnorm verify runs the kernels"
        )
    elif (conversion := conversion_of(model)) and conversion.trained:
        data["not_measured"].append(
            unjudged
            + "this model was trained as RMSNorm, and the original computes LayerNorm"
        )
    else:
        try:
            how = {"max_new_tokens": min(new, JUDGED), "backward": not args.no_train}
            verdict = verify_equivalence(model, inputs=prompt, **how)
            data |= {"passed": verdict.passed, "verdict": verdict.to_dict()}
        except OutOfMemoryError:
            data["not_measured"].append(
                unjudged
                + "out of memory for float64; run hf-rmsnorm verify --device cpu"
            )


def _train(model, batch, args, data: dict) -> None:
    inputs = {"input_ids": batch}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = batch
    if model.can_generate():
        inputs |= {"labels": batch, "use_cache": False}

    def step() -> float:
        out = model(**inputs)
        loss = out.loss if "labels" in inputs else out[0].float().square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.item()

    model.train()
    losses, seconds, peaks = _in_turn(
        model, step, bar(args, range(ROUNDS + 1), "training")
    )
    data |= {"batch": list(batch.shape), "losses": losses}
    data["step_ms"] = _figure(
        [[1e3 * s for s in side] for side in seconds], data, "the training step"
    )
    if peaks[0]:
        data["step_peak_gb"] = _figure(
            [[p / 1e9 for p in side] for side in peaks], data, "memory"
        )
    else:
        data["not_measured"].append("the memory of a training step: that needs a GPU")


def _in_turn(model, call, turns) -> tuple[list, list[list[float]], list[list[int]]]:
    """(the results, the seconds of each run, the peaks of GPU memory) of `call`,
    original and patched.
    """
    import torch

    from .. import patch_model, unpatch_model

    device = model.device
    memory = torch.get_device_module(device) if device.type in ("cuda", "xpu") else None
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    results, seconds, peaks = [None, None], [[], []], [[], []]
    for turn in turns:
        for side, switch in enumerate((unpatch_model, patch_model)):
            switch(model)
            torch.manual_seed(0)  # of dropout
            if memory:
                memory.reset_peak_memory_stats(device)
            wait()
            start = time.perf_counter()
            results[side] = call()
            wait()
            if turn:  # the first compiles kernels and fills caches
                seconds[side].append(time.perf_counter() - start)
                peaks[side] += [memory.max_memory_allocated(device)] if memory else []
    return results, seconds, peaks


def _figure(samples: list[list[float]], data: dict, what: str) -> dict:
    """The medians, their ratio and the samples; `data` gets a line if the samples vary
    too much.
    """
    before, after = map(statistics.median, samples)
    spread = max(max(side) / min(side) for side in samples)
    if spread > STEADY:
        why = f"timings vary {spread:.1f}x, so the machine seems busy; try again"
        data["not_measured"].append(f"{what} reliably: {why}")
    return {
        "before": before,
        "after": after,
        "after_over_before": after / before,
        "samples": samples,
    }


def _text(data: dict) -> str:
    lines = [
        _verdict(data),
        f"{data['swapped']} norms swapped, {data['dtype']} on {data['device']}",
    ]
    lines.append("{:<42} {:>9} {:>9}  {}".format("", "original", "patched", "speed-up"))
    lines += _figure_lines(data)
    if "losses" in data:
        lines.append("{:<42} {:>9.6g} {:>9.6g}".format("loss", *data["losses"]))
    for side, text in zip(("original", "patched"), data.get("texts", ()), strict=False):
        lines += ["", f"--- {side}", text]
    return "\n".join(
        [*lines, *(fitted(f"Not measured: {what}") for what in data["not_measured"])]
    )


def _verdict(data: dict) -> str:
    """Whether both sides give the same results, in one line."""
    place = data.get("first_difference")
    tokens = (
        "the same tokens"
        if place is None
        else f"other tokens from new token {place} on"
    )
    if "verdict" in data and data["passed"]:
        return f"{data['model']}: PASS, the results differ by rounding alone; {tokens}"
    if "verdict" in data:
        return f"{data['model']}: FAIL, the results differ; {tokens}. Run hf-rmsnorm verify for details"
    if "first_difference" in data:
        return f"{data['model']}: {tokens}"
    return f"{data['model']}:"


def _figure_lines(data: dict) -> Iterator[str]:
    step = "{} x {} tokens".format(*data.get("batch", "--"))
    form = "{:<42} {before:>9.4g} {after:>9.4g}  {}".format
    if "tokens_per_second" in data:
        figure = data["tokens_per_second"]
        what = f"tokens per second ({data.get('new_tokens')} new, batch 1)"
        yield form(what, f"{figure['after_over_before']:.2f}", **figure)
    if "step_ms" in data:
        figure = data["step_ms"]
        yield form(
            f"ms per training step ({step})",
            f"{1 / figure['after_over_before']:.2f}",
            **figure,
        )
    if "step_peak_gb" in data:
        yield form(f"peak GB of a training step ({step})", "", **data["step_peak_gb"])
