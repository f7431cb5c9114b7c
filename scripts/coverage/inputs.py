"""Finds inputs that a model runs on, from the names in its forward's signature and from what its errors ask for."""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import time
from collections.abc import Iterator

import torch

from .errors import DERIVED, REFUSALS, WANTED_RANK, absent_arguments, wanted_sizes

BATCH, LENGTH = 2, 12
# Arguments that belong together, added when a model fails for want of something it does not name.
COMPANIONS = (
    ("lang_ids",),
    ("decoder_input_ids",),
    ("attention_mask",),
    ("bbox",),
    ("image_grid_thw",),
    ("grid_thw",),
    ("pixel_values",),
    ("input_features",),
    ("encoder_hidden_states",),
    ("pixel_mask",),
    ("image_sizes",),
    ("labels",),
    ("states", "actions", "rewards", "returns_to_go", "timesteps"),
    ("past_time_features", "past_observed_mask", "future_values", "future_time_features"),
    ("pixel_values", "decoder_input_ids"),
    ("input_ids", "attention_mask"),
    ("pixel_values", "bbox"),
    ("input_ids", "pixel_values"),
    ("pixel_attention_mask",),
    ("spatial_shapes",),
    ("return_loss",),
    ("past_observed_mask",),
    ("padding_mask",),
    ("input_features_mask",),
    ("feature_attention_mask",),
    ("use_cache",),
)


def setting(config, *names: str, default=None):
    """The first of these attributes that the config or, after it, a sub-config of it has."""
    queue = [config]
    for current in queue:
        values = getattr(current, "__dict__", {})
        for name in names:
            value = values.get(name)
            if isinstance(value, (int, list, tuple)) and not isinstance(value, bool):
                return value
        queue += [v for v in values.values() if hasattr(v, "model_type")]
    return default


def _side(value) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[-2], value[-1])


def _of_rank(values: list, rank: int) -> int | None:
    return next((i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v.dim() == rank), None)


class Inputs:
    """Candidate tensors for each argument of one forward."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, seed: int = 0, hints: dict | None = None):
        self.model, self.dtype, self.hints = model, dtype, hints or {}
        self.config = getattr(model, "config", None)
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = {
            name: p
            for name, p in inspect.signature(model.forward).parameters.items()
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        }
        self.optional = [*self.parameters]
        if any(p.kind == p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values()):
            self.optional.append("use_cache")

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def _ids(self, *shape: int) -> torch.Tensor:
        vocabulary = setting(self.config, "vocab_size", default=128)
        vocabulary = vocabulary if isinstance(vocabulary, int) else 128
        low, high = (3, max(4, vocabulary - 40)) if vocabulary > 60 else (0, max(1, vocabulary - 2))
        return torch.randint(low, high, shape, generator=self.generator)

    def _hinted(self, hint):
        if isinstance(hint, tuple):
            return self._normal(*hint)
        if callable(hint):
            hint = hint(*[self.model][: len(inspect.signature(hint).parameters)])
        value = hint
        return value.to(self.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def candidates(self, name: str) -> list:
        """Values for one argument, the likeliest first; empty where nothing is known of it."""
        c = self.config
        if name in self.hints:
            return [self._hinted(self.hints[name])]
        hidden = setting(
            c, "hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim", "decoder_hidden_size", default=64
        )
        hidden = hidden if isinstance(hidden, int) else hidden[-1]
        channels = setting(c, "num_channels", "in_channels", "in_chans", default=3)
        channels = channels if isinstance(channels, int) else 3
        if re.search(r"pixel|image|video|img", name) and not re.search(
            r"mask|size|thw|ids|shape|patches|position|num|hw", name
        ):
            return self._pictures(channels, name)
        if re.search(r"grid_thw|image_grid|video_grid", name):
            return [torch.tensor([[1, 4, 4]]), torch.tensor([[1, 4, 4], [1, 4, 4]]), torch.tensor([[1, 8, 8]])]
        if name in ("target_sizes", "tgt_sizes", "grid_hws", "image_grid_hws", "spatial_shapes"):
            return [torch.tensor([[4, 4]]), torch.tensor([[4, 4], [4, 4]])]
        if name == "image_sizes":
            return [torch.tensor([[32, 32]] * BATCH), torch.tensor([[32, 32]])]
        if re.search(r"bbox|boxes", name):
            return [torch.tensor([1, 2, 5, 9]).expand(BATCH, LENGTH, 4).contiguous(), self._normal(BATCH, LENGTH, 8)]
        if name == "pixel_mask":
            side = _side(setting(c, "image_size", default=32))
            return [torch.ones(BATCH, *side, dtype=torch.long), torch.ones(BATCH, 64, 64, dtype=torch.long)]
        if name == "bool_masked_pos":
            side, patch = _side(setting(c, "image_size", default=32)), _side(setting(c, "patch_size", default=8))
            count = (side[0] // patch[0]) * (side[1] // patch[1])
            frames = (setting(c, "num_frames", default=16), setting(c, "tubelet_size", default=2))
            video = count * frames[0] // frames[1] if all(isinstance(f, int) for f in frames) else count
            masks = [torch.zeros(BATCH, n, dtype=torch.bool) for n in (count, video)]
            for mask in masks:
                mask[:, : mask.shape[1] // 2] = True
            return masks
        if re.search(r"features_mask|feature_attention_mask|padding_mask|observed_mask", name):
            length = setting(c, "context_length", default=0)
            return [torch.ones(BATCH, n, dtype=torch.long) for n in (length or 100, 64, 3000, 1600, LENGTH)]
        if re.search(r"mask$", name):
            return [torch.ones(BATCH, LENGTH, dtype=torch.long), torch.ones(BATCH, LENGTH, dtype=torch.bool)]
        if re.search(r"input_features|audio_mel$|audio_features|spectrogram|^mel", name):
            mels = setting(
                c, "num_mel_bins", "n_mels", "input_feat_per_channel", "num_mel_features", "input_dim", default=80
            )
            mels = mels if isinstance(mels, int) else 80
            frames = [100, 64, 256, 3000, 1024]
            if isinstance(positions := setting(c, "max_source_positions", default=None), int):
                frames.insert(0, 2 * positions)
            wide = setting(c, "feature_projection_input_dim", "input_feature_size", default=160)
            shapes = [s for t in frames for s in ((mels, t), (t, mels), (1, t, mels))]
            return [self._normal(BATCH, *s) for s in [*shapes, (100, wide), (100, hidden)]]
        if re.search(r"input_values|audio_values|waveform|audio$|^audio_input", name):
            mels = setting(c, "num_mel_bins", default=80)
            patch = setting(c, "max_length", default=128)
            shapes = [
                (4000,),
                (1, 4000),
                (16000,),
                (1, 16000),
                (1, 1920),
                (24, mels),
                (patch, mels),
                (1024, mels),
                (1, 48000),
            ]
            return [self._normal(BATCH, *s) for s in shapes]
        if name in (
            "past_values",
            "future_values",
            "past_time_features",
            "future_time_features",
            "context_values",
            "history_values",
        ):
            return self._series(name)
        if name in ("past_values_mask", "freq"):
            return [[0] * BATCH]
        if re.search(r"audio_codes|codes", name):
            return [
                self._ids(BATCH, n, LENGTH) for n in (setting(c, "num_codebooks", "num_quantizers", default=4), 8, 1)
            ]
        if name == "lang_ids":
            return [torch.zeros(BATCH, dtype=torch.long)]
        if re.search(r"(^|_)ids?$|_tokens$|codes$", name):
            books = [setting(c, n) for n in ("num_codebooks", "num_vq", "num_channels")]
            books = [n for b in books if isinstance(b, int) for n in (b, b + 1)] + [8, 9]
            many = [self._ids(BATCH * b, LENGTH) for b in books] + [self._ids(BATCH, LENGTH, b) for b in books]
            many += [self._ids(BATCH, b, LENGTH) for b in books]
            return [self._ids(BATCH, LENGTH), *many, self._ids(BATCH, 64), self._ids(BATCH, 256), self._ids(BATCH, 128)]
        if name == "labels":
            return [self._ids(BATCH, LENGTH)]
        if re.search(r"hidden_states?$|embeds?$|embedding|features|^x$|inputs|latent|noisy|last_hidden", name):
            return [
                self._normal(BATCH, LENGTH, hidden),
                self._normal(BATCH, hidden),
                self._normal(LENGTH, hidden),
                self._normal(BATCH, hidden, LENGTH),
                *self._pictures(channels, name)[:2],
            ]
        if name in ("return_loss", "use_cache"):
            return [False]
        if name == "timesteps":
            return [torch.arange(LENGTH).expand(BATCH, LENGTH)]
        if name.endswith("_idx"):
            return [1, 0]
        if re.search(r"timestep|^t$|sigma|^r$", name):
            return [
                torch.ones(BATCH, dtype=self.dtype),
                torch.ones(1, dtype=self.dtype),
                torch.ones(BATCH, 1).to(self.dtype),
            ]
        if re.search(r"actions", name):
            return [self._normal(BATCH, LENGTH, setting(c, "act_dim", "max_action_dim", default=4))]
        if name in ("states", "state"):
            return [self._normal(BATCH, LENGTH, setting(c, "state_dim", default=17)), self._normal(BATCH, 32)]
        if name in ("rewards", "returns_to_go"):
            return [self._normal(BATCH, LENGTH, 1)]
        return []

    def _pictures(self, channels: int, name: str) -> list[torch.Tensor]:
        c = self.config
        size = _side(setting(c, "image_size", default=32))
        patch = setting(c, "patch_size", default=8)
        patch = patch if isinstance(patch, int) else patch[0]
        frames = setting(c, "num_frames", "frames_per_clip", default=4)
        frames = frames if isinstance(frames, int) else 4
        time_patch = setting(c, "temporal_patch_size", default=1)
        sides = dict.fromkeys((size, (32, 32), (64, 64), (224, 224), (128, 128)))
        flat = channels * patch * patch
        patches = [
            (16, flat * time_patch),
            (BATCH, 16, flat),
            (32, flat * time_patch),
            (64, flat * time_patch),
            (16, channels, patch, patch),
            (BATCH, 16, patch, patch, channels),
        ]
        pictures = [(BATCH, channels, *side) for side in sides]
        videos = [
            s
            for side in list(sides)[:2]
            for s in (
                (BATCH, frames, channels, *side),
                (BATCH, 1, channels, *side),
                (BATCH, 2, channels, *side),
                (BATCH, channels, frames, *side),
                (1, BATCH, channels, *side),
                (BATCH, 1, 1, channels, *side),
            )
        ]
        first = (
            videos[:1] + pictures[:1] + videos[1:] + pictures[1:]
            if "video" in name
            else pictures[:2] + videos + pictures[2:]
        )
        if any("thw" in p or "spatial" in p or "sizes" in p or "hws" in p for p in self.parameters):
            return [self._normal(*s) for s in [*patches[:2], *first, *patches[2:]]]
        return [self._normal(*s) for s in [*first, *patches]]

    def _series(self, name: str) -> list[torch.Tensor]:
        c = self.config
        context = setting(c, "context_length", default=None) or setting(c, "prediction_length", default=None) or 32
        ahead = setting(c, "prediction_length", default=None) or 4
        lags = setting(c, "lags_sequence", default=[0])
        past = context + max(lags)
        inputs = setting(c, "num_input_channels", "input_size", default=1)
        if "time_features" in name:
            length = past if name.startswith("past") else ahead
            return [self._normal(BATCH, length, n) for n in (0, 1, 2)]
        length = ahead if name.startswith("future") else past
        return [self._normal(BATCH, length), self._normal(BATCH, length, inputs), [self._normal(64), self._normal(64)]]

    def start(self) -> list[str]:
        """The arguments to begin with: the model's main input, all required ones, and a decoder's ids."""
        required = [n for n, p in self.parameters.items() if p.default is p.empty]
        main = getattr(self.model, "main_input_name", None)
        names = [n for n in ([main] if isinstance(main, str) else main or []) if n in self.parameters]
        if not names and not required:
            names = [next(iter(self.parameters))] if self.parameters else []
        if getattr(self.config, "is_encoder_decoder", False) and "decoder_input_ids" in self.parameters:
            names.append("decoder_input_ids")
        return list(dict.fromkeys([*self.hints, *([] if self.hints else names), *required]))

    def _widened(self, value, size: tuple[int, int] | None):
        """The value, or another in which one dimension, given by its index, has another size."""
        if size is None:
            return value
        shape = [*value.shape]
        shape[size[0]] = size[1]
        return self._normal(*shape)

    def attempts(self) -> Iterator[dict]:
        """Keyword arguments to try; send the error of each back in, and the next have the argument that it asks for.

        An attempt that fails otherwise than the one it was made from has got further, so its variants come first.
        """
        queue, seen = [(dict.fromkeys(self.start(), 0), "")], set()
        while queue:
            choice, before = queue.pop(0)
            key = tuple(sorted(map(str, choice.items())))
            if key in seen:
                continue
            seen.add(key)
            options = {name: self.candidates(name) for name in choice}
            picked = {name: (index, None) if isinstance(index, int) else index for name, index in choice.items()}
            if any(picked[name][0] >= len(values) and values for name, values in options.items()):
                continue
            error, absent = yield {
                n: self._widened(values[picked[n][0]], picked[n][1]) for n, values in options.items() if values
            }
            missing = [n for n in self.optional if n not in choice and re.search(rf"\b{n}\b", error)]
            named = len(missing)
            ids = any(n.endswith("input_ids") for n in (*choice, *absent))  # a forward makes others from them
            missing += [n for n in absent if n not in {*choice, *missing} and not (ids and DERIVED.search(n))]
            together = [{**choice, **dict.fromkeys(missing, 0)}] if missing else []
            single = [{**choice, n: 0} for n in missing] if len(missing) > 1 else []
            variants = [*together, *single] if named else [*single, *together]
            variants += [
                {**choice, n: (i, size)}
                for n, (i, now) in picked.items()
                if options[n] and now is None
                for size in wanted_sizes(options[n][i], error)
            ]
            if match := WANTED_RANK.search(error):
                ranked = {n: _of_rank(values, int(match[1])) for n, values in options.items()}
                variants += [{**choice, n: i} for n, i in ranked.items() if i is not None and i > picked[n][0]]
            variants += [{**choice, name: index + 1} for name, (index, _) in reversed(picked.items())]
            # A wrong shape is looked for among this argument's other candidates before other arguments are added.
            urgent = len(variants) if re.search(r"shape|size|dimension", error) else len(missing) > 0
            for names in COMPANIONS:
                extra = [n for n in names if n in self.optional and n not in choice]
                if extra and len(choice) < 6:
                    variants.append({**choice, **dict.fromkeys(extra, 0)})
            kind = re.sub(r"\d+", "#", error)[:80]
            made = [(variant, kind) for variant in variants]
            if kind != before:
                queue[:0] = made
            else:
                queue[:0], queue[len(queue) :] = made[:urgent], made[urgent:]


def find_inputs(model, dtype: torch.dtype, budget: float, most: int = 150, hints: dict | None = None):
    """(keyword arguments that the model runs on, []) or (None, the different errors that were met, the first first).

    Args:
        budget: seconds of CPU.
        most: attempts.
        hints: arguments to begin with, as in `coverage_hints.INPUTS`.
    """
    deadline = time.process_time() + budget
    inputs = Inputs(model, dtype, hints=hints)
    attempts = inputs.attempts()
    errors: list[str] = []
    try:
        arguments = next(attempts)
    except REFUSALS as exception:  # a hint that was made for a model of other sizes
        return None, [f"{type(exception).__name__}: {exception}"]
    for _ in itertools.repeat(None, most):
        try:
            torch.manual_seed(0)
            with torch.no_grad():
                output = model(**fresh(arguments))
            if any(True for _ in tensors(output)):
                return arguments, []
            error, absent = "it returned no tensor", []
        except REFUSALS as exception:
            error = f"{type(exception).__name__}: {exception}"
            absent = absent_arguments(exception, inputs.optional) if "None" in error else []
        if error not in errors:
            errors.append(error)
        if time.process_time() > deadline:
            break
        try:
            arguments = attempts.send((error, absent))
        except REFUSALS:  # StopIteration among them
            break
    return None, errors


def fresh(arguments: dict) -> dict:
    """The arguments for another call, with copies of all that a call could change."""
    return {n: v if isinstance(v, torch.Tensor) else copy.deepcopy(v) for n, v in arguments.items()}


def tensors(output) -> Iterator[torch.Tensor]:
    """Every tensor of a model's output, in order; caches are left out."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for key, value in output.items():
            if "past_key_values" not in key and "cache" not in key:
                yield from tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors(value)
