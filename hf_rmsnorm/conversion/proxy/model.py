"""A small random model of the same classes and structure as a big one, which runs in
float64. `plan_conversion` asks for it by `make_proxy`, and then lets `discover.py` look.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import transformers
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ...paths import error_line
from ...sources import without_weights
from ...verification.context import in_dtype_of
from ..errors import ConversionRefused
from .inputs import make_inputs
from .layer_norms import why_no_layer_norm
from .run import MISFITS, LimitedWork, run
from .shrink import VOCABULARY, shrunk

# Parameters: a model of up to SMALL is its own proxy; one of up to LARGE too, where it
# cannot be made narrower; proxy models of up to MIDDLE are tried before larger ones.
SMALL = 1_000_000
MIDDLE = 8_000_000
LARGE = 50_000_000
# Of the types of Transformers that convert, each runs after five failures at most.
MOST_FAILURES = 8
# Till their inputs are found they make 180 million numbers at most, as Falcon-180B and
# Swin for pictures of 384 pixels do. VITS, whose weights say how long it speaks, would
# take minutes.
MOST_NUMBERS = 240_000_000
# Settings that change no norm and no value of the model's own outputs; some hinder a
# run in float64.
PLAIN = {
    "_attn_implementation": "eager",
    "_experts_implementation": "eager",
    "use_cache": False,
    "reorder_and_upcast_attn": False,
    "output_hidden_states": False,
    "output_attentions": False,
    "return_dict": True,
}
# of two channels LayerNorm gives little but a sign, which has no gradients to find
# anything by
LEAST_ROW = 4


@dataclass
class ProxyModel:
    """A small model of the same structure as that of a checkpoint.

    It is untied, in eval mode, float64 throughout, with weights as training leaves
    them: no mean is zero.
    """

    model: PreTrainedModel
    config: PretrainedConfig  # tied where the checkpoint is tied
    inputs: dict
    # parameter of `model` -> its shape in the checkpoint's own size
    checkpoint_shapes: dict[str, torch.Size]
    factor: int  # what most widths were divided by; 1 where the model is its own proxy
    # length of a block here -> in the checkpoint; `discover` adds them
    checkpoint_widths: dict[int, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def checkpoint_blocks(self, name: str, how: dict) -> dict:
        """The blocks of a parameter of `model` in the checkpoint's own size."""
        here = self.model.get_parameter(name).shape[how["axis"]]
        there = self.checkpoint_shapes[name][how["axis"]]
        return {**how, "block": there * how["block"] // here}


def make_proxy(
    source,
    *,
    trust_remote_code: bool = False,
    model_class: type[PreTrainedModel] | None = None,
    inputs: Callable[[PreTrainedModel], dict] | None = None,
    to_convert: bool = False,
) -> ProxyModel:
    """The proxy of a model folder or a `PretrainedConfig`; the options are those of
    `plan_conversion`.

    Args:
        to_convert: refuse a model that has nothing to convert, before any is run.
    """
    config = config_of(source, trust_remote_code)
    cls = model_class or model_class_of(source, config, trust_remote_code)
    try:
        empty = empty_model(cls, config)
    except MISFITS as error:
        raise ConversionRefused(
            f"{cls.__name__} cannot be made from this config: {error_line(error)}"
        ) from error
    if to_convert and (why := why_no_layer_norm(empty)):
        raise ConversionRefused(f"{cls.__name__}: {why}")
    shapes = shapes_of(empty)
    work = LimitedWork(MOST_NUMBERS)
    errors: list[str] = []
    for factor, narrow in _candidates(cls, config, shapes):
        try:
            model = new_model(cls, plain(narrow, tied=False))
            give_weights(model)
            arguments = _arguments(model, inputs, work)
            run(model, arguments)
        except MISFITS as error:
            errors.append(error_line(error))
            if len(errors) == MOST_FAILURES or work.left < 0:
                break  # other widths would not help
            continue
        return ProxyModel(model, plain(narrow), arguments, shapes, factor)
    if not errors:
        raise ConversionRefused(
            f"{cls.__name__}: no narrower model of the same structure was found for its "
            f"{_size(shapes):,} parameters: pass model_class, or a config that can be "
            "narrowed"
        )
    why = f"it does not run on these inputs ({errors[0]}): pass inputs=... that fit"
    if inputs is None:
        why = f"its inputs could not be made here ({errors[0]}): pass inputs=..."
    raise ConversionRefused(f"{cls.__name__}: {why}")


def _arguments(model: PreTrainedModel, inputs, work: LimitedWork) -> dict:
    """The inputs made here by limited work, or the caller's; in float64, their token
    ids within the vocabulary of a model that may be narrowed.
    """
    if inputs is None:
        with work:
            return make_inputs(model)
    arguments = in_dtype_of(model, inputs(model))
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    for name, value in arguments.items():
        if name.endswith("input_ids") and size == VOCABULARY:
            arguments[name] = value % size  # as the ids in its config are
    return arguments


def model_class_of(source, config, trust_remote_code: bool) -> type[PreTrainedModel]:
    """The class that the checkpoint was saved from; else that of its type."""
    remote = getattr(config, "auto_map", None) or {}
    for auto in ("AutoModelForCausalLM", "AutoModel"):
        if auto in remote and trust_remote_code:
            return get_class_from_dynamic_module(remote[auto], str(source))
    names = getattr(config, "architectures", None)
    for name in map(str, names if isinstance(names, list) else ()):
        if hasattr(transformers, name):
            return getattr(transformers, name)
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    for mapping in (causal, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise ConversionRefused(
        f"{source}: {config.architectures} is no model class of Transformers: pass "
        "model_class, or trust_remote_code=True for the folder's own code"
    )


def config_of(source, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a model folder, or the given one; code that the folder brings runs
    only if trusted.
    """
    if isinstance(source, PretrainedConfig):
        return source
    try:
        trusted = bool(trust_remote_code)  # None would ask on stdin
        return AutoConfig.from_pretrained(source, trust_remote_code=trusted)
    except (ValueError, OSError) as error:
        why = error_line(error)
        if "trust_remote_code" in str(error):
            why = "it brings model code of its own: read it, and pass trust_remote_code=True if you trust it"
        raise ConversionRefused(f"{source}: {why}") from error


def plain(config: PretrainedConfig, tied: bool = True) -> PretrainedConfig:
    """A copy that runs the plain code of Transformers, with tied embeddings or not."""
    untied = {} if tied else {"tie_word_embeddings": False}
    return with_settings(config, PLAIN | untied)


def with_settings(config: PretrainedConfig, changes: dict) -> PretrainedConfig:
    """A copy with other values under these keys."""
    config = copy.deepcopy(config)
    config.update(changes)
    return config


def empty_model(
    cls: type[PreTrainedModel], config: PretrainedConfig
) -> PreTrainedModel:
    """The untied model without its weights."""
    return without_weights(partial(cls, plain(config, tied=False)))


def shapes_of(model: PreTrainedModel) -> dict[str, torch.Size]:
    """The shapes of a model's parameters."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _size(shapes: dict[str, torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes.values())


def _candidates(cls, config, shapes) -> Iterator[tuple[int, PretrainedConfig]]:
    """(divisor, config) of proxy models: the config itself if it is small, else
    narrower ones, cheap ones first.
    """
    whole = _size(shapes)
    if whole <= SMALL:
        yield 1, config
        return
    later = []
    if whole <= LARGE:
        later.append((False, whole, 1, config))
    few = (LEAST_ROW,)
    for factor, narrow in shrunk(config):
        try:
            if hasattr(narrow, "validate"):
                narrow.validate()
            here = shapes_of(empty_model(cls, narrow))
        except MISFITS:  # widths that do not go together: the next style may
            continue
        if _ranks(here) != _ranks(shapes):
            continue
        size = _size(here)
        # whether it has left rows of too few channels
        is_cramped = any(here[n][-1:] < few <= shapes[n][-1:] for n in here)
        if size <= MIDDLE and not is_cramped:
            yield factor, narrow
        elif size <= LARGE:
            later.append((is_cramped, size, factor, narrow))
    for _, _, factor, narrow in sorted(later, key=lambda candidate: candidate[:2]):
        yield factor, narrow


def _ranks(shapes: dict[str, torch.Size]) -> dict[str, int]:
    """What two models of one structure share."""
    return {name: len(shape) for name, shape in shapes.items()}


def token_table(model: PreTrainedModel) -> torch.nn.Module | None:
    """The embedding of a model's token ids; None if there is none."""
    try:
        return model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def new_model(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A model in eval mode and float64; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cls(config).double().eval()


@torch.no_grad()
def give_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Give a model weights like trained ones: gains near their initial values, and no
    mean that is zero.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    modules = [*model.modules()]
    tables = {id(m.weight) for m in modules if isinstance(m, torch.nn.Embedding)}
    for p in model.parameters():
        if not p.is_floating_point() or not p.numel():
            continue
        first = p.flatten()[0].item()
        if id(p) in tables:
            p.copy_(0.7 * normal(p.shape) + 0.3 * normal(p.shape[0], 1) + 0.2)
        elif (p == first).all():
            p.copy_(first + 0.1 + 0.25 * normal(p.shape))
        elif p.ndim < 2:
            p.mul_(1 + 0.1 * normal(p.shape))
        else:
            fan = p[0].numel() ** (0.5 if p.ndim == 3 else 1)
            p.copy_(normal(p.shape) / math.sqrt(fan))
