"""How fast MODEL generates and trains on this machine before and after the patch, and whether it stays the same.

Medians of runs that take turns; what this machine cannot measure is named. A training step is a forward and a backward,
as the optimizer's part is the same in both. Exits with 1 where the results differ by more than rounding.
"""

import statistics
import time

from ..paths import fitted
from ..sources import find
from . import models
from .common import DTYPES, CliError, Result, Table, add_count, add_device, add_model, bar, pick_device
from .inspect import read_text

ROUNDS = 5  # of each side
PROMPT, JUDGED = 64, 32  # tokens that are gone on from; new tokens that the judge generates
STEADY = 1.5  # by how much the slowest of equal runs may exceed the fastest


def add_arguments(parser) -> None:
    add_model(parser)
    parser.add_argument("--prompt", help="go on from this text, and print what either side writes (default: some text)")
    add_count(parser, "--new-tokens", 64, "generate N tokens")
    add_count(parser, "--batch", 1, "train on N sequences")
    add_count(parser, "--length", 512, "of N tokens each")
    parser.add_argument("--no-train", action="store_true", help="leave out the training step and its memory")
    parser.add_argument("--dtype", choices=DTYPES, help="the weights' dtype (default: as stored)")
    add_device(parser)


def run(args) -> Result:
    source = find(args.model, args.trust_remote_code)
    device = pick_device(args.device)
    models.quieten()
    import torch

    from .. import patch_model
    from ..ops.backend import describe_backend
    from ..verification.context import max_positions

    model = models.load_model(source, DTYPES.get(args.dtype, "auto"), device, "time patch_model from Python")
    length = min(args.length, max_positions(model.config))
    total, tokenizer = args.batch * length, models.load_tokenizer(source)
    ids = models.tokens(model, tokenizer, read_text(None), total)[0]
    batch = ids[torch.arange(total, device=ids.device) % len(ids)].view(args.batch, length)
    if args.prompt is not None and tokenizer is None:
        raise CliError(f"{source.name} has no tokenizer to read a prompt with: leave --prompt out")

    backend, reason = describe_backend(device)
    data = {"model": source.name, "device": str(device), "dtype": str(model.dtype).removeprefix("torch."),
            "backend": backend, "backend_reason": reason, "swapped": len(patch_model(model).swapped),
            "passed": True, "not_measured": []}  # fmt: skip
    if length < args.length:
        data["not_measured"].append(f"sequences of {args.length} tokens: the model takes {length}")
    if backend != "triton" or "interpreter" in reason:
        data["not_measured"].append(f"what the kernels gain or cost: {reason}")
    if model.can_generate() and not model.config.is_encoder_decoder:
        _generate(model, tokenizer, batch, args, data)
    else:
        data["not_measured"].append(f"generation: a {type(model).__name__} does not go on from a text")
    if not args.no_train:
        try:
            _train(model, batch, args, data)
        except torch.OutOfMemoryError:
            data["not_measured"].append("a training step: out of memory; pass a smaller --batch or --length")
    return Result(data, _blocks(data), 0 if data["passed"] else 1)


def greedy(model, ids, count: int) -> list[int]:
    """The `count` likeliest tokens behind ids (1, n), whatever the generation_config asks for."""
    from ..verification.context import GREEDY

    how = {"max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0, **GREEDY}
    return model.generate(ids, attention_mask=ids.new_ones(ids.shape), **how)[0, ids.shape[1] :].tolist()


def _generate(model, tokenizer, batch, args, data: dict) -> None:
    from torch import OutOfMemoryError

    from .. import verify_equivalence
    from ..patching.converted import conversion_of
    from ..verification.context import max_positions, prompt_length

    ids = batch[:1] if args.prompt is None else models.tokens(model, tokenizer, args.prompt, None)
    most = PROMPT if args.prompt is None else ids.shape[1]
    prompt = ids[:, : prompt_length(model.config, most, args.new_tokens)]
    new = min(args.new_tokens, max_positions(model.config) - prompt.shape[1])
    tokens, seconds, _ = _in_turn(model, lambda: greedy(model, prompt, new), bar(args, range(ROUNDS + 1), "generating"))
    rates = [[new / s for s in side] for side in seconds]
    data |= {"new_tokens": new, "tokens_per_second": _figure(rates, data, "generation"), "token_ids": tokens}
    data["first_difference"] = next((i for i, (a, b) in enumerate(zip(*tokens, strict=True)) if a != b), None)
    if args.prompt is not None:
        data["texts"] = [args.prompt + tokenizer.decode(side, skip_special_tokens=True) for side in tokens]
    unjudged = "whether the results differ by rounding alone: "
    if data["backend"] != "triton":
        data["not_measured"].append(unjudged + "both sides ran the same code; hf-rmsnorm verify runs the kernels")
    elif (conversion := conversion_of(model)) and conversion.trained:
        data["not_measured"].append(unjudged + "it was trained as RMSNorm, and computes LayerNorm without the patch")
    else:
        try:
            how = {"max_new_tokens": min(new, JUDGED), "backward": not args.no_train}
            verdict = verify_equivalence(model, inputs=prompt, **how)
            data |= {"passed": verdict.passed, "verdict": verdict.to_dict()}
        except OutOfMemoryError:
            data["not_measured"].append(unjudged + "out of memory for float64; hf-rmsnorm verify --device cpu does it")


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
    losses, seconds, peaks = _in_turn(model, step, bar(args, range(ROUNDS + 1), "training"))
    data |= {"batch": list(batch.shape), "losses": losses}
    data["step_ms"] = _figure([[1e3 * s for s in side] for side in seconds], data, "the training step")
    if peaks[0]:
        data["step_peak_gb"] = _figure([[p / 1e9 for p in side] for side in peaks], data, "memory")
    else:
        data["not_measured"].append("the memory of a training step: only a GPU's allocator tells its peak")


def _in_turn(model, call, turns) -> tuple[list, list[list[float]], list[list[int]]]:
    """Of both sides, before and after: what `call` gave, the seconds of each run, and on a GPU the peaks of memory."""
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
    """The medians, how they compare, and the samples; says so where those scatter too much to compare anything."""
    before, after = map(statistics.median, samples)
    spread = max(max(side) / min(side) for side in samples)
    if spread > STEADY:
        data["not_measured"].append(f"{what} reliably: equal runs differ by a factor of {spread:.1f}, is it busy here?")
    return {"before": before, "after": after, "after_over_before": after / before, "samples": samples}


def _blocks(data: dict) -> list[str | Table]:
    blocks = [f"{data['model']}: {data['swapped']} norms patched, {data['dtype']} on {data['device']}"]
    for side, text in zip(("before", "after"), data.get("texts", ()), strict=False):
        blocks += ["", f"--- {side} the patch", text, ""]
    step = "{} x {} tokens".format(*data.get("batch", "--"))
    rows = [("", "before", "after", "after / before")]
    for key, what in (
        ("tokens_per_second", f"tokens per second, {data.get('new_tokens')} new, batch 1"),
        ("step_ms", f"ms a training step, {step}"),
        ("step_peak_gb", f"peak GB of it, {step}"),
    ):
        if key in data:
            rows.append((what, *"{before:.4g} {after:.4g} {after_over_before:.3f}".format(**data[key]).split()))
    blocks.append(Table(rows, "\n".join("{:<40} {:>9} {:>9}  {}".format(*row) for row in rows)))
    if "losses" in data:
        blocks.append("Losses: {:.6g} before, {:.6g} after.".format(*data["losses"]))
    if "first_difference" in data:
        place = data["first_difference"]
        blocks.append("Same tokens." if place is None else f"The tokens differ from new token {place} on.")
    if "verdict" in data:
        said = "PASS, no more than rounding." if data["passed"] else "FAIL, as hf-rmsnorm verify tells in full."
        blocks.append(f"Difference of the results: {said}")
    return blocks + [fitted(f"Not measured here: {what}") for what in data["not_measured"]]
