"""Makes a model of a type that is small and runs, and the arguments that it runs on.

Vision towers that Transformers takes from timm get a stand-in, so that the types around
them can be built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
import time
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.utils import ModelOutput, is_timm_available

from .hints import CONFIG, INPUTS
from .inputs import find_inputs
from .models import Shrinker, build
from .numbers import STYLES
from .runs import line

REPAIRS = 5  # of a config, by what errors ask for
TIME_LIMIT = 180  # seconds a type may take, on a slow machine
DTYPE_ERROR = re.compile(r"dtype|[Bb]float16|BFloat16|same type|scalar type|Half|FFT")


def first_that_runs(cls, config, features, started, result, say):
    """(model, arguments, how it was made) in the first style that runs, or None."""
    best = None
    for style in STYLES:
        if time.monotonic() - started > TIME_LIMIT / 4 * (2 - features):
            break
        say(f"building in style {style}, features {features}")
        try:
            built = build_in(style, cls, config, features, CONFIG.get(result["type"]))
        except Exception as error:
            # any constructor may refuse a size in its own way: the next style is tried
            result["error"] = result["error"] or f"{style}: {line(error)}"
            continue
        if built is None:
            return None
        model, switched = to_bfloat16(built[0]), built[1]
        how = {"style": style, "features": switched, "dtype": "bfloat16"}
        result["built"] = True
        say(f"finding inputs in style {style}, features {features}")
        arguments, dtype = _arguments(model, style, result)
        if arguments is not None:
            result["ran"] = True
            return model, arguments, {**how, "dtype": str(dtype).removeprefix("torch.")}
        best = best or (model.bfloat16(), None, how)
    return best if not result["ran"] else None


def _arguments(model, style: str, result: dict) -> tuple[dict | None, torch.dtype]:
    """(arguments that the model runs on, the dtype that it has then); None after
    errors, which `result` gets.
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
        result["error"] = f"{style}, {dtype}: {errors[0][:300]}"
        if not any(DTYPE_ERROR.search(error) for error in errors):
            break
    return None, dtype


def build_in(style: str, cls, config, features: bool, hints: dict | None = None):
    """(model in float32, the features switched on) in a style; None where there are
    none to switch on. What an error asks for is tried before it is raised.
    """
    shrinker = Shrinker(style, features, hints)
    for attempt in range(REPAIRS):
        try:
            tiny = shrinker.make(config)
            switched = sorted(shrinker.switched)
            if features and not switched:
                return None
            with _seconds(30):
                return build(cls, tiny, small=style != "default"), switched
        except Exception as error:
            # any constructor may refuse a size in its own way
            if attempt == REPAIRS - 1 or not shrinker.repair(line(error)):
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


@dataclasses.dataclass
class StandInOutput(ModelOutput):
    last_hidden_state: Any = None
    logits: torch.Tensor | None = None
    hidden_states: tuple | None = None


class StandIn(transformers.PreTrainedModel):
    """In the place of a part that timm makes: patches of 8 x 8, projected, with no
    norm.
    """

    def __init__(self, config):
        super().__init__(config)
        made = (
            config.model_args
            if isinstance(getattr(config, "model_args", None), dict)
            else {}
        )
        width = getattr(config, "hidden_size", None) or made.get("embed_dim", 64)
        self.levels = len(made["out_indices"]) if made.get("features_only") else 0
        self.projection = torch.nn.Conv2d(3, width, 8, 8)
        self.head = torch.nn.Linear(width, getattr(config, "num_labels", 2) or 2)
        self.post_init()

    def forward(self, pixel_values, **kwargs):
        y = self.projection(pixel_values)
        levels = [
            torch.nn.functional.interpolate(y, scale_factor=2.0**-i)
            for i in range(self.levels)
        ]
        return StandInOutput(
            last_hidden_state=levels or y, logits=self.head(y.mean((2, 3)))
        )


def stand_in_for_timm() -> None:
    """Let the types that hold a model of timm be built without it; timm's own types are
    not built then.
    """
    if is_timm_available():
        return
    for model_type, name in MODEL_MAPPING_NAMES.items():
        if "TimmWrapperModel" in (name, *name):
            config = CONFIG_MAPPING[model_type]
            model = type("StandIn", (StandIn,), {"config_class": config})
            for auto in (
                transformers.AutoModel,
                transformers.AutoModelForImageClassification,
            ):
                auto.register(config, model, exist_ok=True)
