"""Values to try for one argument of a forward, by its name and by the model's config."""

from __future__ import annotations

import copy
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


class Candidates:
    """Candidate values for each argument of one forward."""

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
        self.parameters = {}
        self.optional = []
        for name, parameter in inspect.signature(model.forward).parameters.items():
            if parameter.kind == parameter.VAR_KEYWORD:
                self.optional.append("use_cache")
            elif parameter.kind != parameter.VAR_POSITIONAL:
                self.parameters[name] = parameter
                self.optional.append(name)

    def candidates(self, name: str) -> list:
        """Values for one argument, the likeliest first; empty where nothing is known of
        it.
        """
        if name in self.hints:
            return [self._hinted(self.hints[name])]
        for says, values in RULES:
            if says(name):
                return list(map(self._value, values(self, name)))
        return []

    def _value(self, value):
        """A tuple is the shape of random numbers."""
        return self.normal(*value) if isinstance(value, tuple) else value

    def _hinted(self, hint):
        if callable(hint):
            of_model = inspect.signature(hint).parameters
            hint = hint(self.model) if of_model else hint()
        hint = self._value(hint)
        if isinstance(hint, torch.Tensor) and hint.is_floating_point():
            return hint.to(self.dtype)
        return hint

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def ids(self, *shape: int) -> torch.Tensor:
        vocabulary = self.number("vocab_size", default=128)
        low, high = 0, max(1, vocabulary - 2)
        if vocabulary > 60:
            low, high = 3, max(4, vocabulary - 40)
        return torch.randint(low, high, shape, generator=self.generator)

    def setting(self, *names: str, default=None):
        return setting(self.config, *names, default=default)

    def number(self, *names: str, default: int) -> int:
        """A setting that is no list."""
        value = self.setting(*names, default=default)
        return value if isinstance(value, int) else default

    def side(self, name: str, default: int) -> tuple[int, int]:
        """Height and width."""
        value = self.setting(name, default=default)
        if isinstance(value, int):
            return value, value
        return value[-2], value[-1]

    @property
    def hidden_size(self) -> int:
        names = (
            "hidden_size",
            "d_model",
            "n_embd",
            "embed_dim",
            "hidden_dim",
            "decoder_hidden_size",
        )
        hidden = self.setting(*names, default=64)
        return hidden if isinstance(hidden, int) else hidden[-1]


def _ones(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


def _masked_patches(c: Candidates, name: str) -> list:
    """Masks of the patches of a picture, or of a video, half of which are masked."""
    side, patch = c.side("image_size", 32), c.side("patch_size", 8)
    count = (side[0] // patch[0]) * (side[1] // patch[1])
    frames = c.setting("num_frames", default=16)
    tubelet = c.setting("tubelet_size", default=2)
    video = count
    if isinstance(frames, int) and isinstance(tubelet, int):
        video = count * frames // tubelet
    masks = [torch.zeros(BATCH, n, dtype=torch.bool) for n in (count, video)]
    for mask in masks:
        mask[:, : mask.shape[1] // 2] = True
    return masks


def _pixel_mask(c: Candidates, name: str) -> list:
    return [_ones(BATCH, *c.side("image_size", 32)), _ones(BATCH, 64, 64)]


def _mask_of_features(c: Candidates, name: str) -> list:
    length = c.setting("context_length", default=0) or 100
    return [_ones(BATCH, n) for n in (length, 64, 3000, 1600, LENGTH)]


def _spectrogram(c: Candidates, name: str) -> list:
    names = (
        "num_mel_bins",
        "n_mels",
        "input_feat_per_channel",
        "num_mel_features",
        "input_dim",
    )
    mels = c.number(*names, default=80)
    frames = [100, 64, 256, 3000, 1024]
    positions = c.setting("max_source_positions")
    if isinstance(positions, int):
        frames.insert(0, 2 * positions)
    wide = c.setting("feature_projection_input_dim", "input_feature_size", default=160)
    shapes = []
    for length in frames:
        shapes += (mels, length), (length, mels), (1, length, mels)
    shapes.append((100, wide))
    shapes.append((100, c.hidden_size))
    return _of_a_batch(shapes)


def _waveform(c: Candidates, name: str) -> list:
    mels = c.setting("num_mel_bins", default=80)
    patch = c.setting("max_length", default=128)
    shapes = [(4000,), (1, 4000), (16000,), (1, 16000), (1, 1920)]
    shapes += (24, mels), (patch, mels), (1024, mels)
    shapes.append((1, 48000))
    return _of_a_batch(shapes)


def _of_a_batch(shapes: list[tuple]) -> list[tuple]:
    return [(BATCH, *shape) for shape in shapes]


def _codes(c: Candidates, name: str) -> list:
    books = c.setting("num_codebooks", "num_quantizers", default=4)
    return [c.ids(BATCH, n, LENGTH) for n in (books, 8, 1)]


def _tokens(c: Candidates, name: str) -> list:
    books = []
    for one in ("num_codebooks", "num_vq", "num_channels"):
        count = c.setting(one)
        if isinstance(count, int):
            books += count, count + 1
    books += 8, 9
    shapes = [(BATCH, LENGTH)]
    shapes += [(BATCH * count, LENGTH) for count in books]
    shapes += [(BATCH, LENGTH, count) for count in books]
    shapes += [(BATCH, count, LENGTH) for count in books]
    shapes += [(BATCH, length) for length in (64, 256, 128)]
    return [c.ids(*shape) for shape in shapes]


def _vectors(c: Candidates, name: str) -> list:
    hidden = c.hidden_size
    return [
        (BATCH, LENGTH, hidden),
        (BATCH, hidden),
        (LENGTH, hidden),
        (BATCH, hidden, LENGTH),
        *_pictures(c, name)[:2],
    ]


def _pictures(c: Candidates, name: str) -> list:
    channels = c.number("num_channels", "in_channels", "in_chans", default=3)
    patch = c.setting("patch_size", default=8)
    patch = patch if isinstance(patch, int) else patch[0]
    frames = c.number("num_frames", "frames_per_clip", default=4)
    sides = ((32, 32), (64, 64), (224, 224), (128, 128))
    sides = list(dict.fromkeys((c.side("image_size", 32), *sides)))
    flat = channels * patch * patch
    wide = flat * c.setting("temporal_patch_size", default=1)
    patches = [
        (16, wide),
        (BATCH, 16, flat),
        (32, wide),
        (64, wide),
        (16, channels, patch, patch),
        (BATCH, 16, patch, patch, channels),
    ]
    pictures = [(BATCH, channels, *side) for side in sides]
    videos = []
    for side in sides[:2]:
        videos.append((BATCH, frames, channels, *side))
        videos.append((BATCH, 1, channels, *side))
        videos.append((BATCH, 2, channels, *side))
        videos.append((BATCH, channels, frames, *side))
        videos.append((1, BATCH, channels, *side))
        videos.append((BATCH, 1, 1, channels, *side))
    first = pictures[:2] + videos + pictures[2:]
    if "video" in name:
        first = videos[:1] + pictures[:1] + videos[1:] + pictures[1:]
    if any(re.search("thw|spatial|sizes|hws", p) for p in c.parameters):
        return [*patches[:2], *first, *patches[2:]]
    return first + patches


def _series(c: Candidates, name: str) -> list:
    ahead = c.setting("prediction_length")
    context = c.setting("context_length") or ahead or 32
    ahead = ahead or 4
    past = context + max(c.setting("lags_sequence", default=[0]))
    if "time_features" in name:
        length = past if name.startswith("past") else ahead
        return [(BATCH, length, n) for n in (0, 1, 2)]
    length = ahead if name.startswith("future") else past
    inputs = c.setting("num_input_channels", "input_size", default=1)
    shapes = [(BATCH, length), (BATCH, length, inputs)]
    return [*map(c._value, shapes), [c.normal(64), c.normal(64)]]


def _actions(c: Candidates, name: str) -> list:
    return [(BATCH, LENGTH, c.setting("act_dim", "max_action_dim", default=4))]


def _states(c: Candidates, name: str) -> list:
    return [(BATCH, LENGTH, c.setting("state_dim", default=17)), (BATCH, 32)]


def _times(c: Candidates, name: str) -> list:
    shapes = (BATCH,), (1,), (BATCH, 1)
    return [_ones(*shape, dtype=c.dtype) for shape in shapes]


def _boxes(c: Candidates, name: str) -> list:
    box = torch.tensor([1, 2, 5, 9])
    return [box.expand(BATCH, LENGTH, 4).contiguous(), (BATCH, LENGTH, 8)]


def _is_picture(name: str) -> bool:
    of_one = re.search(r"mask|size|thw|ids|shape|patches|position|num|hw", name)
    return bool(re.search(r"pixel|image|video|img", name)) and not of_one


def _named(*names: str) -> Callable[[str], bool]:
    return frozenset(names).__contains__


def _has(pattern: str) -> Callable[[str], re.Match | None]:
    return re.compile(pattern).search


def _always(*values) -> Callable[[Candidates, str], list]:
    """The same values for every model; a list is that of a tensor."""
    made = []
    for value in values:
        if isinstance(value, list):
            value = torch.tensor(value)
        made.append(value)
    return lambda c, name: copy.deepcopy(made)


GRID = [1, 4, 4]
SERIES = (
    "past_values", "future_values", "past_time_features", "future_time_features",
    "context_values", "history_values",
)  # fmt: skip
GRIDS = (
    "target_sizes", "tgt_sizes", "grid_hws", "image_grid_hws", "spatial_shapes",
)  # fmt: skip
FEATURES_MASK = "features_mask|feature_attention_mask|padding_mask|observed_mask"
VECTORS = (
    "hidden_states?$|embeds?$|embedding|features|^x$|inputs|latent|noisy|last_hidden"
)
# (whether an argument's name is meant, the values to try); the first that is meant
# counts.
RULES: tuple[tuple[Callable, Callable[[Candidates, str], list]], ...] = (
    (_is_picture, _pictures),
    (
        _has("grid_thw|image_grid|video_grid"),
        _always([GRID], [GRID, GRID], [[1, 8, 8]]),
    ),
    (_named(*GRIDS), _always([[4, 4]], [[4, 4], [4, 4]])),
    (_named("image_sizes"), _always([[32, 32]] * BATCH, [[32, 32]])),
    (_has("bbox|boxes"), _boxes),
    (_named("pixel_mask"), _pixel_mask),
    (_named("bool_masked_pos"), _masked_patches),
    (_has(FEATURES_MASK), _mask_of_features),
    (
        _has("mask$"),
        _always(_ones(BATCH, LENGTH), _ones(BATCH, LENGTH, dtype=torch.bool)),
    ),
    (_has("input_features|audio_mel$|audio_features|spectrogram|^mel"), _spectrogram),
    (_has("input_values|audio_values|waveform|audio$|^audio_input"), _waveform),
    (_named(*SERIES), _series),
    (_named("past_values_mask", "freq"), lambda c, name: [[0] * BATCH]),
    (_has("audio_codes|codes"), _codes),
    (_named("lang_ids"), _always([0] * BATCH)),
    (_has("(^|_)ids?$|_tokens$|codes$"), _tokens),
    (_named("labels"), lambda c, name: [c.ids(BATCH, LENGTH)]),
    (_has(VECTORS), _vectors),
    (_named("return_loss", "use_cache"), _always(False)),
    (_named("timesteps"), _always([list(range(LENGTH))] * BATCH)),
    (_has("_idx$"), _always(1, 0)),
    (_has("timestep|^t$|sigma|^r$"), _times),
    (_has("actions"), _actions),
    (_named("states", "state"), _states),
    (_named("rewards", "returns_to_go"), lambda c, name: [(BATCH, LENGTH, 1)]),
)
