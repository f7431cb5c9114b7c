"""Time generation and training of MODEL on a GPU, original and patched, and compare the
results.

Each figure is the median of runs that take turns, with the range of the speed-ups. A
training step is a forward and a backward. On a CPU both sides run the same code, so
nothing is measured there, unless --device cpu asks for it.
"""

import statistics
import time

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
    pick_device,
    progress_bar,
)
from .plot import add_plot, draw_times

ROUNDS = 5  # of each side
PROMPT = 64  # tokens of the prompt


def add_arguments(parser) -> None:
    add_model(parser)
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
    add_plot(parser, "the times")


def run(args) -> Result:
    source = find(args.model, args.trust_remote_code)
    device = pick_device(args.device)
    models.quieten()
    from .. import patch_model
    from ..ops.backend import runs_on
    from ..verification.context import max_positions

    with progress_bar(1, f"loading {source.name}"):
        model = models.load_model(source, DTYPES.get(args.dtype, "auto"), device)
    if model.main_input_name != "input_ids":
        raise CliError(
            f"{source.name} takes {model.main_input_name} and not a text: time "
            "patch_model from Python"
        )
    where = runs_on(device)
    data = {
        "model": source.name,
        "device": str(device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": where["backend"],
        "backend_reason": where["reason"],
    }
    if device.type == "cpu" and args.device is None:
        text = (
            f"{source.name}: nothing to measure: there is no GPU here, and on a CPU a "
            "patched model runs the code of the original. To time it all the same: "
            "--device cpu"
        )
        return Result(data, fitted(text))
    length = min(args.length, max_positions(model.config))
    ids = models.tokens(model, source, length)
    data["swapped"] = len(patch_model(model).swapped)
    times = {}  # in milliseconds, by phase
    if model.can_generate() and not model.config.is_encoder_decoder:
        data |= _generate(model, ids, args.new_tokens)
        times["generate, a token"] = [1e3 / n for n in data["tokens_per_second"]]
    if not args.no_train:
        data |= _train(model, ids.repeat(args.batch, 1))
        times["train, a step"] = data["step_ms"]
    if args.plot:
        draw_times(args.plot, f"{source.name}, {data['dtype']} on {device}", times)
    return Result(data, _text(data))


def greedy(model, ids, count: int) -> list[int]:
    """The next `count` likeliest tokens after ids (1, n), whatever the
    generation_config asks for.
    """
    from ..verification.context import GREEDY

    length = {"max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
    mask = ids.new_ones(ids.shape)
    generated = model.generate(ids, attention_mask=mask, **length, **GREEDY)
    return generated[0, ids.shape[1] :].tolist()


def _generate(model, ids, new_tokens: int) -> dict:
    from ..verification.context import max_positions, prompt_length

    prompt = ids[:, : prompt_length(model.config, PROMPT, new_tokens)]
    count = min(new_tokens, max_positions(model.config) - prompt.shape[1])
    tokens, seconds, speed_ups = _in_turn(
        model, "generating", lambda: greedy(model, prompt, count)
    )
    return {
        "new_tokens": count,
        "tokens_per_second": [count / median for median in seconds],
        "generation_speed_ups": speed_ups,
        "token_ids": tokens,
    }


def _train(model, batch) -> dict:
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
    losses, seconds, speed_ups = _in_turn(model, "training", step)
    return {
        "batch": list(batch.shape),
        "losses": losses,
        "step_ms": [1e3 * median for median in seconds],
        "training_speed_ups": speed_ups,
    }


def _in_turn(model, what: str, call) -> tuple[list, list[float], list[float]]:
    """(the results, the median seconds) of `call`, each of the original and the patched
    model; and the speed-up of each round.
    """
    import torch

    from .. import patch_model, unpatch_model

    switches = (unpatch_model, patch_model) * (ROUNDS + 1)
    results, seconds = [], []
    with progress_bar(len(switches), what, "run") as bar:
        for switch in switches:
            switch(model)
            torch.manual_seed(0)  # of dropout
            start = time.perf_counter()
            results.append(call())  # which waits for the GPU, as it returns numbers
            seconds.append(time.perf_counter() - start)
            bar.update()
    # the first run of each compiles kernels and fills caches
    original, patched = seconds[2::2], seconds[3::2]
    medians = [statistics.median(original), statistics.median(patched)]
    rounds = zip(original, patched, strict=True)
    return results[-2:], medians, [before / after for before, after in rounds]


def _speed_up(original: float, patched: float, rounds: list[float]) -> str:
    """Of the medians, and the range of the rounds."""
    return f"{original / patched:.2f} ({min(rounds):.2f} to {max(rounds):.2f})"


def _text(data: dict) -> str:
    row = "{:<42} {:>9.5g} {:>9.5g}".format
    lines = [
        "{model}: {swapped} norms swapped, {dtype} on {device}".format(**data),
        f"{'':<42} {'original':>9} {'patched':>9}  speed-up (rounds)",
    ]
    compared = []
    if "token_ids" in data:
        original, patched = data["tokens_per_second"]
        what = "tokens per second ({new_tokens} new, batch 1)".format(**data)
        speed_up = _speed_up(1 / original, 1 / patched, data["generation_speed_ups"])
        lines.append(f"{row(what, original, patched)}  {speed_up}")
        tokens, others = data["token_ids"]
        same = tokens == others
        compared = [
            "the same tokens" if same else "other tokens: run hf-rmsnorm verify"
        ]
    if "losses" in data:
        original, patched = data["step_ms"]
        what = "ms per training step ({} x {} tokens)".format(*data["batch"])
        speed_up = _speed_up(original, patched, data["training_speed_ups"])
        lines.append(f"{row(what, original, patched)}  {speed_up}")
        lines.append(row("loss", *data["losses"]))
    ran = f"The norms ran in {data['backend_reason']}"
    if data["backend"] != "triton":
        ran += "; both times are of the same code"
    return "\n".join([*lines, *compared, fitted(f"{ran}.")])
