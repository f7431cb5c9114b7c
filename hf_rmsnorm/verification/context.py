"""How models are run to be compared: their inputs, evaluation mode, greedy generation,
their outputs. `verify_equivalence`, a conversion and the commands all ask here.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

# For `generate`, whatever the model's own generation_config asks for.
GREEDY = {
    "do_sample": False,
    "num_beams": 1,
    "temperature": None,
    "top_p": None,
    "top_k": None,
}
# Of names of outputs for which no model is run. Those of CLIP's vision tower come
# besides the model's; their `last_hidden_state` is not normalised.
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


def leaves_of(model) -> dict[str, torch.nn.Module]:
    """The modules without children, by path."""
    modules = model.named_modules()
    return {path: module for path, module in modules if not [*module.children()]}


def max_positions(config) -> int:
    """The most tokens that a model of this config takes; `sys.maxsize` if the config
    has no limit.
    """
    text = config.get_text_config()
    limits = [getattr(text, key, None) for key in _POSITIONS]
    given = (limit for limit in limits if isinstance(limit, int) and limit > 0)
    return min(given, default=sys.maxsize)


def prompt_length(config, tokens: int, new_tokens: int) -> int:
    """How many of `tokens` to give where `new_tokens` are then to be generated; half of
    a context that is too short.
    """
    most = max_positions(config)
    return max(1, min(tokens, max(most - new_tokens, most // 2)))


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
            f"{type(model).__name__}: nothing is known of the input {main!r}: pass "
            "inputs"
        )
    config = model.config
    names = inspect.signature(model.forward).parameters
    rows, length = tokens
    size = rows, prompt_length(config, length, new_tokens)
    made = [main]
    for name in _inputs_beside(main, config):
        if name in names:
            made.append(name)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        inputs = {name: _random(config, name, size) for name in made}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in names.values())
    if takes_any or "use_cache" in names:
        inputs["use_cache"] = False
    return inputs


def _inputs_beside(main: str, config) -> Iterator[str]:
    """The inputs that a model needs together with its main one."""
    # CLIP's kind has a tower for text and one for images; others hold some of a text's
    # tokens free for images
    towers = hasattr(config, "text_config") and hasattr(config, "vision_config")
    of_text = hasattr(config, "image_token_id") or hasattr(config, "image_token_index")
    if main == "input_ids" and towers and not of_text:
        yield "pixel_values"
    if getattr(config, "is_encoder_decoder", False):
        yield "decoder_input_ids"


def _random_ids(config, size: tuple[int, int]) -> torch.Tensor:
    """Token ids that have no special meaning."""
    count = first_number(config, "vocab_size", default=64)
    words = set(range(3, count))
    for name, value in vars(config).items():
        if name.endswith("_id") and isinstance(value, int):
            words.discard(value)
    plain = torch.tensor(sorted(words))
    return plain[torch.randint(len(plain), size)]


def _random(config, name: str, size: tuple[int, int]) -> torch.Tensor:
    """Token ids, images or audio, by the name of the argument."""
    if name.endswith("input_ids"):
        return _random_ids(config, size)
    if name == "pixel_values":
        shape = picture_shape(config, 64)
    elif name == "input_features":
        names = "num_mel_bins", "input_feat_per_channel"
        frames = 2 * first_number(config, "max_source_positions", default=50)
        shape = first_number(config, *names, default=80), frames
    else:
        shape = (4000,)
    return torch.randn(size[0], *shape, dtype=torch.float64)


def picture_shape(config, default: int) -> tuple[int, int, int]:
    """The channels, height and width that the config, or a part of it, names; the
    default is of height and width.
    """
    names = "num_channels", "in_channels", "in_chans"
    channels = first_number(config, *names, default=3)
    sizes = _first_numbers(config, "image_size", "img_size", default=default)
    return channels, sizes[0], sizes[-1]


def first_number(config, *keys: str, default: int) -> int:
    """The first whole number that the config, or a part of it, has by one of these
    names.
    """
    return _first_numbers(config, *keys, default=default)[0]


def _first_numbers(config, *keys: str, default: int) -> list[int]:
    """One number, or several of a list, as `first_number`."""
    for part in (config, *vars(config).values()):
        for key in keys:
            value = getattr(part, key, None)
            numbers = value if isinstance(value, (list, tuple)) else [value]
            if numbers and all(isinstance(n, int) and n for n in numbers):
                return list(numbers)
    return [default]


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
            is_beside = any(word in key for word in _NOT_OUTPUT)
            if key != "hidden_states" and not is_beside:
                yield from output_tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from output_tensors(value)
