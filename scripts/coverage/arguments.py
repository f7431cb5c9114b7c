"""Values to try for one argument of a forward, by its name and by the model's config."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import torch

BATCH, LENGTH = 2, 12


def setting(config, *names: str, default=None):
    """The first of these attributes that the config or, after it, a sub-config of it
    has.
    """
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


class Candidates:
    """Candidate tensors for each argument of one forward."""

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype,
        seed: int = 0,
        hints: dict | None = None,
    ):
        self.model, self.dtype, self.hints = model, dtype, hints or {}
        self.config = getattr(model, "config", None)
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters = {
            name: p
            for name, p in inspect.signature(model.forward).parameters.items()
            if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        }
        self.optional = [*self.parameters]
        if any(
            p.kind == p.VAR_KEYWORD
            for p in inspect.signature(model.forward).parameters.values()
        ):
            self.optional.append("use_cache")

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def _ids(self, *shape: int) -> torch.Tensor:
        vocabulary = setting(self.config, "vocab_size", default=128)
        vocabulary = vocabulary if isinstance(vocabulary, int) else 128
        low, high = (
            (3, max(4, vocabulary - 40))
            if vocabulary > 60
            else (0, max(1, vocabulary - 2))
        )
        return torch.randint(low, high, shape, generator=self.generator)

    def _hinted(self, hint):
        if isinstance(hint, tuple):
            return self._normal(*hint)
        if callable(hint):
            hint = hint(*[self.model][: len(inspect.signature(hint).parameters)])
        value = hint
        return (
            value.to(self.dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
        )

    def candidates(self, name: str) -> list:
        """Values for one argument, the likeliest first; empty where nothing is known of
        it.
        """
        if name in self.hints:
            return [self._hinted(self.hints[name])]
        for says, values in RULES:
            if says(name):
                return values(self, name)
        return []

    def _hidden_size(self) -> int:
        names = (
            "hidden_size",
            "d_model",
            "n_embd",
            "embed_dim",
            "hidden_dim",
            "decoder_hidden_size",
        )
        hidden = setting(self.config, *names, default=64)
        return hidden if isinstance(hidden, int) else hidden[-1]

    def _masked_patches(self, name: str) -> list[torch.Tensor]:
        """Masks of the patches of a picture, or of a video, half of which are masked."""
        side = _side(setting(self.config, "image_size", default=32))
        patch = _side(setting(self.config, "patch_size", default=8))
        count = (side[0] // patch[0]) * (side[1] // patch[1])
        frames, tubelet = (
            setting(self.config, "num_frames", default=16),
            setting(self.config, "tubelet_size", default=2),
        )
        video = (
            count * frames // tubelet
            if isinstance(frames, int) and isinstance(tubelet, int)
            else count
        )
        masks = [torch.zeros(BATCH, n, dtype=torch.bool) for n in (count, video)]
        for mask in masks:
            mask[:, : mask.shape[1] // 2] = True
        return masks

    def _pixel_mask(self, name: str) -> list[torch.Tensor]:
        side = _side(setting(self.config, "image_size", default=32))
        return [
            torch.ones(BATCH, *side, dtype=torch.long),
            torch.ones(BATCH, 64, 64, dtype=torch.long),
        ]

    def _mask_of_features(self, name: str) -> list[torch.Tensor]:
        length = setting(self.config, "context_length", default=0)
        return [
            torch.ones(BATCH, n, dtype=torch.long)
            for n in (length or 100, 64, 3000, 1600, LENGTH)
        ]

    def _spectrogram(self, name: str) -> list[torch.Tensor]:
        c = self.config
        names = (
            "num_mel_bins",
            "n_mels",
            "input_feat_per_channel",
            "num_mel_features",
            "input_dim",
        )
        mels = setting(c, *names, default=80)
        mels = mels if isinstance(mels, int) else 80
        frames = [100, 64, 256, 3000, 1024]
        if isinstance(
            positions := setting(c, "max_source_positions", default=None), int
        ):
            frames.insert(0, 2 * positions)
        wide = setting(
            c, "feature_projection_input_dim", "input_feature_size", default=160
        )
        shapes = [s for t in frames for s in ((mels, t), (t, mels), (1, t, mels))]
        return [
            self._normal(BATCH, *s)
            for s in [*shapes, (100, wide), (100, self._hidden_size())]
        ]

    def _waveform(self, name: str) -> list[torch.Tensor]:
        mels = setting(self.config, "num_mel_bins", default=80)
        patch = setting(self.config, "max_length", default=128)
        waves = [(4000,), (1, 4000), (16000,), (1, 16000), (1, 1920)]
        shapes = [*waves, (24, mels), (patch, mels), (1024, mels), (1, 48000)]
        return [self._normal(BATCH, *s) for s in shapes]

    def _codes(self, name: str) -> list[torch.Tensor]:
        books = setting(self.config, "num_codebooks", "num_quantizers", default=4)
        return [self._ids(BATCH, n, LENGTH) for n in (books, 8, 1)]

    def _tokens(self, name: str) -> list[torch.Tensor]:
        books = [
            setting(self.config, n) for n in ("num_codebooks", "num_vq", "num_channels")
        ]
        books = [n for b in books if isinstance(b, int) for n in (b, b + 1)] + [8, 9]
        many = [self._ids(BATCH * b, LENGTH) for b in books] + [
            self._ids(BATCH, LENGTH, b) for b in books
        ]
        many += [self._ids(BATCH, b, LENGTH) for b in books]
        return [
            self._ids(BATCH, LENGTH),
            *many,
            self._ids(BATCH, 64),
            self._ids(BATCH, 256),
            self._ids(BATCH, 128),
        ]

    def _vectors(self, name: str) -> list[torch.Tensor]:
        hidden = self._hidden_size()
        shapes = [
            (BATCH, LENGTH, hidden),
            (BATCH, hidden),
            (LENGTH, hidden),
            (BATCH, hidden, LENGTH),
        ]
        return [*(self._normal(*s) for s in shapes), *self._pictures(name)[:2]]

    def _times(self, name: str) -> list[torch.Tensor]:
        return [
            torch.ones(*shape, dtype=self.dtype)
            for shape in ((BATCH,), (1,), (BATCH, 1))
        ]

    def _actions(self, name: str) -> list[torch.Tensor]:
        return [
            self._normal(
                BATCH,
                LENGTH,
                setting(self.config, "act_dim", "max_action_dim", default=4),
            )
        ]

    def _states(self, name: str) -> list[torch.Tensor]:
        return [
            self._normal(BATCH, LENGTH, setting(self.config, "state_dim", default=17)),
            self._normal(BATCH, 32),
        ]

    def _pictures(self, name: str) -> list[torch.Tensor]:
        c = self.config
        channels = setting(c, "num_channels", "in_channels", "in_chans", default=3)
        channels = channels if isinstance(channels, int) else 3
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
        if any(
            "thw" in p or "spatial" in p or "sizes" in p or "hws" in p
            for p in self.parameters
        ):
            return [self._normal(*s) for s in [*patches[:2], *first, *patches[2:]]]
        return [self._normal(*s) for s in [*first, *patches]]

    def _series(self, name: str) -> list[torch.Tensor]:
        c = self.config
        context = (
            setting(c, "context_length", default=None)
            or setting(c, "prediction_length", default=None)
            or 32
        )
        ahead = setting(c, "prediction_length", default=None) or 4
        lags = setting(c, "lags_sequence", default=[0])
        past = context + max(lags)
        inputs = setting(c, "num_input_channels", "input_size", default=1)
        if "time_features" in name:
            length = past if name.startswith("past") else ahead
            return [self._normal(BATCH, length, n) for n in (0, 1, 2)]
        length = ahead if name.startswith("future") else past
        return [
            self._normal(BATCH, length),
            self._normal(BATCH, length, inputs),
            [self._normal(64), self._normal(64)],
        ]


def _is_picture(name: str) -> bool:
    of_one = re.search(r"mask|size|thw|ids|shape|patches|position|num|hw", name)
    return bool(re.search(r"pixel|image|video|img", name)) and not of_one


def _grids(inputs: Candidates, name: str) -> list[torch.Tensor]:
    return [
        torch.tensor([[1, 4, 4]]),
        torch.tensor([[1, 4, 4], [1, 4, 4]]),
        torch.tensor([[1, 8, 8]]),
    ]


def _flat_grids(inputs: Candidates, name: str) -> list[torch.Tensor]:
    return [torch.tensor([[4, 4]]), torch.tensor([[4, 4], [4, 4]])]


def _image_sizes(inputs: Candidates, name: str) -> list[torch.Tensor]:
    return [torch.tensor([[32, 32]] * BATCH), torch.tensor([[32, 32]])]


def _boxes(inputs: Candidates, name: str) -> list[torch.Tensor]:
    return [
        torch.tensor([1, 2, 5, 9]).expand(BATCH, LENGTH, 4).contiguous(),
        inputs._normal(BATCH, LENGTH, 8),
    ]


def _masks(inputs: Candidates, name: str) -> list[torch.Tensor]:
    return [
        torch.ones(BATCH, LENGTH, dtype=torch.long),
        torch.ones(BATCH, LENGTH, dtype=torch.bool),
    ]


def _named(*names: str) -> Callable[[str], bool]:
    return frozenset(names).__contains__


def _has(pattern: str) -> Callable[[str], re.Match | None]:
    return re.compile(pattern).search


SERIES = (
    "past_values", "future_values", "past_time_features", "future_time_features",
    "context_values", "history_values",
)  # fmt: skip
# (whether an argument's name is meant, the values to try); the first that is meant
# counts.
RULES: tuple[tuple[Callable, Callable[[Candidates, str], list]], ...] = (
    (_is_picture, Candidates._pictures),
    (_has("grid_thw|image_grid|video_grid"), _grids),
    (
        _named(
            "target_sizes", "tgt_sizes", "grid_hws", "image_grid_hws", "spatial_shapes"
        ),
        _flat_grids,
    ),
    (_named("image_sizes"), _image_sizes),
    (_has("bbox|boxes"), _boxes),
    (_named("pixel_mask"), Candidates._pixel_mask),
    (_named("bool_masked_pos"), Candidates._masked_patches),
    (
        _has("features_mask|feature_attention_mask|padding_mask|observed_mask"),
        Candidates._mask_of_features,
    ),
    (_has("mask$"), _masks),
    (
        _has("input_features|audio_mel$|audio_features|spectrogram|^mel"),
        Candidates._spectrogram,
    ),
    (
        _has("input_values|audio_values|waveform|audio$|^audio_input"),
        Candidates._waveform,
    ),
    (_named(*SERIES), Candidates._series),
    (_named("past_values_mask", "freq"), lambda inputs, name: [[0] * BATCH]),
    (_has("audio_codes|codes"), Candidates._codes),
    (_named("lang_ids"), lambda inputs, name: [torch.zeros(BATCH, dtype=torch.long)]),
    (_has("(^|_)ids?$|_tokens$|codes$"), Candidates._tokens),
    (_named("labels"), lambda inputs, name: [inputs._ids(BATCH, LENGTH)]),
    (
        _has(
            "hidden_states?$|embeds?$|embedding|features|^x$|inputs|latent|noisy|last_hidden"
        ),
        Candidates._vectors,
    ),
    (_named("return_loss", "use_cache"), lambda inputs, name: [False]),
    (
        _named("timesteps"),
        lambda inputs, name: [torch.arange(LENGTH).expand(BATCH, LENGTH)],
    ),
    (_has("_idx$"), lambda inputs, name: [1, 0]),
    (_has("timestep|^t$|sigma|^r$"), Candidates._times),
    (_has("actions"), Candidates._actions),
    (_named("states", "state"), Candidates._states),
    (
        _named("rewards", "returns_to_go"),
        lambda inputs, name: [inputs._normal(BATCH, LENGTH, 1)],
    ),
)
