"""How models are run to be compared: their inputs, evaluation mode, greedy generation,
their outputs.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from transformers import PretrainedConfig

# For `generate`, whatever the model's own generation_config asks for.
GREEDY = {
    "do_sample": False,
    "num_beams": 1,
    "temperature": None,
    "top_p": None,
    "top_k": None,
}
# The outputs of CLIP's vision tower come besides the model's; their `last_hidden_state`
# is not normalised.
_NOT_OUTPUT = ("cache", "past_key_values", "attentions", "loss", "vision_model_output")
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_target_positions",
)
TOKENS = (2, 24)  # rows and their length
_RANDOM = ("pixel_values", "input_values", "input_features")


@contextmanager
def evaluating(model):
    """Have a model in evaluation mode, and each of its modules in its own mode again
    afterwards.
    """
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        yield


def max_positions(config) -> int:
    """The most tokens that a model of this config takes; `sys.maxsize` if the config
    has no limit.
    """
    text = config.get_text_config()
    values = [getattr(text, key, None) for key in _POSITIONS]
    limits = [value for value in values if isinstance(value, int) and value > 0]
    return min(limits, default=sys.maxsize)


def prompt_length(config, tokens: int, new_tokens: int) -> int:
    """How many of `tokens` to give where `new_tokens` are then to be generated; half of
    a context that is too short.
    """
    most = max_positions(config)
    return max(1, min(tokens, max(most - new_tokens, most // 2)))


@contextmanager
def hooked(model, paths, hook):
    """Inside, ``hook(path, args, output)`` is called after each forward of the modules
    at `paths`, before other hooks.

    A result of the hook that is not None becomes the output.
    """
    with ExitStack() as stack:
        for path in paths:

            def called(module, args, kwargs, output, path=path):
                return hook(path, (*args, *kwargs.values()), output)

            module = model.get_submodule(path)
            handle = module.register_forward_hook(
                called, prepend=True, with_kwargs=True
            )
            stack.callback(handle.remove)
        yield


def one_line(error: BaseException) -> str:
    """An error on one line: its type and its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def default_inputs(
    model, tokens: tuple[int, int] = TOKENS, new_tokens: int = 0
) -> dict:
    """Keyword arguments: random token ids, pixels or audio, by the names in the
    forward's signature.

    `tokens` are rows and their length, which leaves room for `new_tokens`.
    """
    main = getattr(model, "main_input_name", None)
    if main not in (*_RANDOM, "input_ids"):
        raise ValueError(
            f"{type(model).__name__}: nothing is known of the input {main!r}: pass inputs"
        )
    config = model.config
    names = inspect.signature(model.forward).parameters
    draw = _Draw(config, tokens[0], prompt_length(config, tokens[1], new_tokens))
    if main != "input_ids":
        inputs = {main: draw.floats(main)}
    else:
        inputs = {main: draw.ids()}
        if "pixel_values" in names and _compares_text_with_images(config):
            inputs["pixel_values"] = draw.floats("pixel_values")
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = draw.ids()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in names.values())
    if takes_any or "use_cache" in names:
        inputs["use_cache"] = False
    return inputs


def _compares_text_with_images(config) -> bool:
    """Whether the model has a tower for each; others hold a text's tokens free for
    images.
    """
    towers = all(hasattr(config, name) for name in ("text_config", "vision_config"))
    return towers and not any("image_token" in key for key in vars(config))


class _Draw:
    """Random inputs of the sizes in a model's config, the same each time."""

    def __init__(self, config, rows: int, length: int):
        self.config = config
        self.rows = rows
        self.length = length
        self.generator = torch.Generator().manual_seed(0)

    def ids(self) -> torch.Tensor:
        """Token ids that have no special meaning."""
        words = set(range(self._number("vocab_size", default=64)))
        for name, value in vars(self.config).items():
            if name.endswith("_id") and isinstance(value, int):
                words.discard(value)
        plain = sorted(words - {0, 1, 2})
        size = (self.rows, self.length)
        chosen = torch.randint(len(plain), size, generator=self.generator)
        return torch.tensor(plain)[chosen]

    def floats(self, name: str) -> torch.Tensor:
        """Images or audio, by the name of the argument."""
        if name == "pixel_values":
            size = self._number("image_size", default=64)
            shape = self._number("num_channels", "in_channels", default=3), size, size
        elif name == "input_features":
            bins = self._number("num_mel_bins", "input_feat_per_channel", default=80)
            shape = bins, 2 * self._number("max_source_positions", default=50)
        else:
            shape = (4000,)
        generator = self.generator
        return torch.randn(self.rows, *shape, generator=generator, dtype=torch.float64)

    def _number(self, *keys: str, default: int) -> int:
        """The first whole number that the config, or a part of it, has by one of these
        names.
        """
        inner = vars(self.config).values()
        parts = [part for part in inner if isinstance(part, PretrainedConfig)]
        for part in (self.config, *parts):
            for key in keys:
                value = getattr(part, key, None)
                if isinstance(value, (list, tuple)) and value:
                    value = value[0]
                if isinstance(value, int) and value:
                    return value
        return default


def in_dtype_of(model, inputs: dict) -> dict:
    """Inputs whose floats have the dtype of a model's weights."""
    return {
        name: value.to(model.dtype) if is_float(value) else value
        for name, value in inputs.items()
    }


def is_float(value) -> bool:
    """Whether it is a tensor of floats."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def output_tensors(output) -> Iterator[torch.Tensor]:
    """The tensors that a model returns, except caches, losses and the hidden states of
    layers.
    """
    if is_float(output):
        yield output
    elif isinstance(output, dict):
        for key, value in output.items():
            if not _is_beside(key):
                yield from output_tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from output_tensors(value)


def _is_beside(key: str) -> bool:
    """Whether an output of this name is not what the model is run for."""
    return key == "hidden_states" or any(word in key for word in _NOT_OUTPUT)
