"""Makes a model of a type that is small and runs, and the arguments that it runs on."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections import defaultdict

import torch

from .hints import CONFIG, INPUTS
from .inputs import find_inputs
from .models import Shrinker, build
from .numbers import FIXED, STYLES
from .workers import line

TIME_LIMIT = 180  # seconds a type may take, on a slow machine
DTYPE_ERROR = re.compile(r"dtype|[Bb]float16|BFloat16|same type|scalar type|Half|FFT")


def first_that_runs(cls, config, features, started, done, result, say):
    """(model, arguments, how it was made) in the first style that runs, or None."""
    best, kinds = None, defaultdict(set)
    for style in STYLES:
        if any(len(styles) > 2 for styles in kinds.values()) and style != STYLES[-1]:
            # three ways of choosing sizes gave the same error: the size is not the
            # cause
            continue
        if time.monotonic() - started > TIME_LIMIT / 4 * (2 - features):
            break
        say(f"building in style {style}, features {features}")
        try:
            built = _build(
                cls, config, style, features, done, CONFIG.get(result["type"], {})
            )
        except Exception as error:
            # any constructor may refuse a size in its own way: the next style is tried
            result["errors"].append(f"{style}: {line(error)}")
            result["error"] = result["error"] or result["errors"][0]
            continue
        if built is None:
            return None
        model, switched = built
        how = {"style": style, "features": switched, "dtype": "bfloat16"}
        result["built"] = True
        say(f"finding inputs in style {style}, features {features}")
        arguments, dtype = _arguments(model, style, result, kinds)
        result["error"] = result["errors"][-1] if result["errors"] else None
        if arguments is not None:
            result["ran"] = True
            return model, arguments, {**how, "dtype": str(dtype).removeprefix("torch.")}
        best = best or (model.bfloat16(), None, how)
    return best if not result["ran"] else None


def _arguments(
    model, style: str, result: dict, kinds: dict[str, set]
) -> tuple[dict | None, torch.dtype]:
    """(arguments that the model runs on, the dtype that it has then); None after
    errors, which `result` gets.

    Args:
        kinds: by error, without its numbers, the styles that it was met in.
    """
    for dtype in (torch.bfloat16, torch.float32):
        try:
            with _seconds(40):
                model = model.float() if dtype == torch.float32 else model
                arguments, errors = find_inputs(
                    model, dtype, budget=4, hints=INPUTS.get(result["type"])
                )
        except TimeoutError as timeout:
            arguments, errors = None, [line(timeout)]
        if arguments is not None:
            return arguments, dtype
        result["errors"].append(f"{style}, {dtype}: {errors[0][:300]}")
        kinds[re.sub(r"\d+", "#", errors[0])[:80]].add(
            "fixed" if style in FIXED else style
        )
        if not any(DTYPE_ERROR.search(error) for error in errors):
            break
    return None, dtype


def _build(
    cls, config, style: str, features: bool, done: set, hints: dict, repairs: int = 5
):
    """(model in bfloat16, the features switched on), or None if there are none or those
    were done before.

    What an error asks for is tried before it is raised.
    """
    shrinker = Shrinker(style, features, hints)
    for attempt in range(repairs):
        try:
            tiny = shrinker.make(config)
            switched = tuple(sorted(shrinker.switched))
            if switched in done or (features and not switched):
                return None
            with _seconds(30):
                return to_bfloat16(
                    build(cls, tiny, small=style not in ("shallow", "default"))
                ), list(switched)
        except Exception as error:  # see there
            if attempt == repairs - 1 or not shrinker.repair(line(error)):
                raise


@contextlib.contextmanager
def _seconds(limit: float):
    """TimeoutError in the main thread of a child that spends more than this inside."""

    def stop(*_):
        raise TimeoutError(f"not done after {limit} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def to_bfloat16(model: torch.nn.Module) -> torch.nn.Module:
    """What ``from_pretrained(dtype=torch.bfloat16)`` gives: bfloat16 but for the
    modules that are kept in float32.
    """
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    pattern = (
        re.compile("|".join(rf"(^|\.){re.escape(k)}($|\.)" for k in kept))
        if kept
        else None
    )
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not (pattern and pattern.search(name)):
            parameter.data = parameter.data.to(torch.bfloat16)
    saved = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers():
        # Rotary frequencies and the like are made in float32 and are not in the
        # checkpoint, so they stay so.
        if (
            name in saved
            and buffer.is_floating_point()
            and not (pattern and pattern.search(name))
        ):
            buffer.data = buffer.data.to(torch.bfloat16)
    return model
