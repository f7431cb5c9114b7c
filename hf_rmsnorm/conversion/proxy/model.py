"""A small random model of the same classes and structure as a big one, which runs in
float64.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import transformers
from accelerate import init_empty_weights
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ...record import RECORD_KEY, TRAINED_AS_RMS, trained_as_rms
from ...verification.context import is_float, one_line
from ..folders import read_json
from ..plan import ConversionRefused
from .inputs import made_inputs
from .keys import ResidualWeight
from .run import MISFITS, run
from .shrink import VOCABULARY, shrunk

# Parameters: a model of up to SMALL is its own proxy; one of up to LARGE too, where it
# cannot be made narrower; proxy models of up to MIDDLE are tried before larger ones.
SMALL, MIDDLE, LARGE = 1_000_000, 8_000_000, 50_000_000
# Settings that change no norm and no value of the model's own outputs; some hinder a
# run in float64.
PLAIN = {
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
    shapes: dict[str, torch.Size]
    factor: int  # what most widths were divided by; 1 where the model is its own proxy
    folder: Path | None
    # `inputs` are random ones made here, of which there can be more, and not the
    # caller's
    made_inputs: bool
    # of the rows of a norm -> in the checkpoint; by discovery
    widths: dict[int, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def entries(self, residual_weights: Iterable[ResidualWeight]) -> dict[str, dict]:
        """Parameter -> ``{"axis", "block", "blocks"}`` as in the record, `block` in the checkpoint's own size."""
        found: dict[str, dict] = {}
        for weight in residual_weights:
            here, there = (
                self.model.get_parameter(weight.parameter).shape[weight.axis],
                self.shapes[weight.parameter][weight.axis],
            )
            blocks = (
                None
                if len(weight.blocks) * weight.block == here
                else list(weight.blocks)
            )
            found[weight.parameter] = {
                "axis": weight.axis,
                "block": there * weight.block // here,
                "blocks": blocks,
            }
        return found


def make_proxy(
    source,
    *,
    trust_remote_code: bool = False,
    model_class: type[PreTrainedModel] | None = None,
    inputs: Callable[[PreTrainedModel], dict] | None = None,
    trained: bool = False,
) -> ProxyModel:
    """The proxy of a model folder or a `PretrainedConfig`; the options are those of
    `plan_conversion`.

    Args:
        trained: also of a model that was trained as RMSNorm; the proxy's own norms are
            LayerNorms all the same.
    """
    config, cls = config_and_class(source, trust_remote_code, model_class, trained)
    try:
        shapes = shapes_of(cls, config)
    except MISFITS as error:
        raise ConversionRefused(
            f"{cls.__name__} cannot be made from this config: {one_line(error)}"
        ) from error
    folder = None if isinstance(source, PretrainedConfig) else Path(source)
    not_made = not_run = ""
    for factor, narrow in _candidates(cls, config, shapes):
        try:
            model = _random_model(cls, narrow)
        except MISFITS as error:
            not_made = not_made or one_line(error)
            continue
        try:
            arguments = {
                name: _fitting(name, value, model)
                for name, value in (inputs or made_inputs)(model).items()
            }
            run(model, arguments)
        except MISFITS as error:
            not_run = not_run or one_line(error)
            continue
        return ProxyModel(
            model, plain(narrow), arguments, shapes, factor, folder, inputs is None
        )
    raise ConversionRefused(
        _no_proxy(cls, _size(shapes), not_made, not_run, inputs is None)
    )


def _random_model(
    cls: type[PreTrainedModel], config: PretrainedConfig
) -> PreTrainedModel:
    if hasattr(config, "validate"):
        config.validate()
    model = new_model(cls, plain(config, tied=False))
    give_weights(model)
    return model


def _fitting(name: str, value, model: PreTrainedModel):
    """An argument in float64, its token ids within the vocabulary of a model that may
    be narrowed.
    """
    if not isinstance(value, torch.Tensor):
        return value
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if name.endswith("input_ids") and size == VOCABULARY:
        # as the ids in its config are
        return torch.where(value < size, value, value % size)
    return value.double() if is_float(value) else value


def _no_proxy(cls, size: int, not_made: str, not_run: str, default: bool) -> str:
    """Why there is no proxy model, and what to do."""
    if not_run and default:
        return f"{cls.__name__}: its inputs could not be made here ({not_run}): pass inputs=..."
    if not_run:
        return f"{cls.__name__} does not run on these inputs ({not_run}): pass inputs=... that fit"
    what = f"{cls.__name__} has {size:,} parameters, and no narrower model of the same structure was found"
    return f"{what} ({not_made or 'none has the same parameters'}): pass model_class, or a config that can be narrowed"


def config_and_class(
    source, trust_remote_code: bool, model_class, trained: bool = False
) -> tuple[PretrainedConfig, type[PreTrainedModel]]:
    """The config of a source, and the class of its model; refused if a record says that
    it is RMSNorm already.
    """
    config = config_of(source, trust_remote_code)
    _check_record(source, config, trained)
    if model_class is not None:
        return config, model_class
    remote = getattr(config, "auto_map", None) or {}
    for auto in (AutoModelForCausalLM, AutoModel):
        if (
            auto.__name__ in remote
            and trust_remote_code
            and not isinstance(source, PretrainedConfig)
        ):
            return config, get_class_from_dynamic_module(
                remote[auto.__name__], str(source)
            )
    names = getattr(config, "architectures", None) or []
    cls = getattr(transformers, names[0], None) if names else None
    if cls is not None:
        return config, cls
    for auto in (AutoModelForCausalLM, AutoModel):
        if type(config) in auto._model_mapping:
            cls = auto._model_mapping[type(config)]
            return config, cls[0] if isinstance(cls, (list, tuple)) else cls
    cure = (
        "pass model_class, or trust_remote_code=True where the folder brings its code"
    )
    raise ConversionRefused(
        f"{', '.join(names) or type(config).__name__} is no model class of Transformers: {cure}"
    )


def _check_record(source, config: PretrainedConfig, trained: bool) -> None:
    """Refuse a source that was trained as RMSNorm after a conversion, unless that is
    wanted.
    """
    record = getattr(config, RECORD_KEY, None)
    if record is None:
        return
    if not isinstance(record, dict):
        raise ConversionRefused(
            f"{source}: {RECORD_KEY} in its config.json is no record of this package: take it out"
        )
    if record.get("computes") == TRAINED_AS_RMS and not (
        trained and trained_as_rms(record)
    ):
        what = "by the record in its config.json this is an RMSNorm model already, trained as one: patch_model runs it"
        raise ConversionRefused(
            f'{config.model_type}: {what}; target="native" may change its architecture'
        )


def config_of(source, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a model folder, or a copy of the given one; code that the folder
    brings runs only if trusted.
    """
    if isinstance(source, PretrainedConfig):
        return copy.deepcopy(source)
    path = Path(source)
    if not (path / "config.json").is_file():
        cure = 'pass the folder of a model, such as hf_rmsnorm.demo.demo_path("gpt2")'
        raise ConversionRefused(f"{path} has no config.json: {cure}")
    stored = read_json(path / "config.json")
    if stored.get("quantization_config"):
        raise ConversionRefused(
            f"{path} is quantised: convert the checkpoint it was made from, then quantise"
        )
    try:
        # None would ask on stdin
        return AutoConfig.from_pretrained(
            path, trust_remote_code=bool(trust_remote_code)
        )
    except (ValueError, OSError) as error:
        if stored.get("auto_map") and not trust_remote_code:
            cure = "read it, and pass trust_remote_code=True if you trust it"
            raise ConversionRefused(
                f"{path} brings model code of its own: {cure}"
            ) from error
        raise ConversionRefused(f"{path}: {_why_no_config(stored, error)}") from error


def _why_no_config(stored: dict, error: Exception) -> str:
    """Why Transformers makes no config of a config.json, and what to do."""
    kind = stored.get("model_type")
    if kind is None:
        return "config.json names no model_type: pass the folder of a Transformers checkpoint"
    if kind not in transformers.CONFIG_MAPPING:
        return f"Transformers {transformers.__version__} has no model type {kind!r}: install one that has it"
    return one_line(error)


def plain(config: PretrainedConfig, tied: bool = True) -> PretrainedConfig:
    """A copy that runs the plain code of Transformers, with tied embeddings or not."""
    changes = {
        "_attn_implementation": "eager",
        "_experts_implementation": "eager",
        **PLAIN,
    }
    return with_settings(
        config, changes if tied else {**changes, "tie_word_embeddings": False}
    )


def with_settings(config: PretrainedConfig, changes: dict) -> PretrainedConfig:
    """A copy with other values under these keys."""
    config = copy.deepcopy(config)
    config.update(changes)
    return config


class _NoRandomNumbers(TorchFunctionMode):
    """Leaves new tensors as they are: to draw numbers for the meta device takes most of
    the time there, for nothing.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in ("normal_", "uniform_", "trunc_normal_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def shapes_of(
    cls: type[PreTrainedModel], config: PretrainedConfig
) -> dict[str, torch.Size]:
    """The parameters of the untied model and their shapes; no memory is taken for them."""
    try:
        with torch.device("meta"), _NoRandomNumbers():
            model = cls(plain(config, tied=False))
    except MISFITS:  # a constructor that reads numbers back from tensors it made
        with init_empty_weights():
            model = cls(plain(config, tied=False))
    return {name: p.shape for name, p in model.named_parameters()}


def _size(shapes: dict[str, torch.Size]) -> int:
    return sum(shape.numel() for shape in shapes.values())


def _candidates(cls, config, shapes) -> Iterator[tuple[int, PretrainedConfig]]:
    """(divisor, config) of proxy models: the config itself if it is small, else
    narrower ones, cheap ones first.
    """
    if _size(shapes) <= SMALL:
        yield 1, config
        return
    later = [(False, _size(shapes), 1, config)] if _size(shapes) <= LARGE else []
    for factor, narrow in shrunk(config):
        try:
            here = shapes_of(cls, narrow)
        except MISFITS:  # widths that do not go together: the next style may
            continue
        if here.keys() != shapes.keys() or any(
            len(here[name]) != len(shapes[name]) for name in here
        ):
            continue
        size, cramped = _size(here), _is_cramped(here, shapes)
        if size <= MIDDLE and not cramped:
            yield factor, narrow
        elif size <= LARGE:
            later.append((cramped, size, factor, narrow))
    for _, _, factor, narrow in sorted(later, key=lambda candidate: candidate[:2]):
        yield factor, narrow


def _is_cramped(here: dict[str, torch.Size], there: dict[str, torch.Size]) -> bool:
    """Whether narrowing has left rows of too few channels."""
    return any(here[name][-1:] < (LEAST_ROW,) <= there[name][-1:] for name in here)


def new_model(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A model in eval mode and float64; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return cls(config).double().eval()


@torch.no_grad()
def give_weights(model: torch.nn.Module, seed: int = 0, lean: float = 1.0) -> None:
    """Give a model weights like trained ones: gains near their initial values, and no
    mean that is zero.

    `lean` is how far the means of matrices are from zero; 0 for random means.
    """
    generator = torch.Generator().manual_seed(seed)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    tables = {
        id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)
    }
    for p in model.parameters():
        if not p.is_floating_point() or not p.numel():
            continue
        first = p.flatten()[0].item()
        if id(p) in tables:
            values = 0.7 * normal(p.shape)
            p.copy_(values + 0.3 * normal(p.shape[0], 1) + 0.2)
        elif bool((p == first).all()):
            p.copy_(
                (first if math.isfinite(first) else 0.0) + 0.1 + 0.25 * normal(p.shape)
            )
        elif p.ndim < 2:
            p.mul_(1 + 0.1 * normal(p.shape))
        else:
            fan = p[0].numel() ** (0.5 if p.ndim == 3 else 1)
            values = normal(p.shape)
            mean = lean * (0.3 * normal(1).item() + 0.2)
            p.copy_((values + mean) / math.sqrt(fan))


def attend_to_encoder(proxy: ProxyModel) -> bool:
    """Give a decoder without its encoder some encoder states to attend to; whether it
    takes them.
    """
    config = proxy.model.config
    if getattr(config, "is_encoder_decoder", False):
        return False
    names = inspect.signature(proxy.model.forward).parameters
    rows = len(next(v for v in proxy.inputs.values() if isinstance(v, torch.Tensor)))
    for count in dict.fromkeys(
        (rows, rows // (getattr(config, "num_codebooks", None) or 1))
    ):
        for name, wrap in (
            ("encoder_hidden_states", lambda x: x),
            ("encoder_outputs", lambda x: (x,)),
        ):
            if name not in names or name in proxy.inputs:
                continue
            generator = torch.Generator().manual_seed(2)
            try:
                width = config.get_text_config().hidden_size
                states = wrap(
                    torch.randn(
                        count, 7, width, generator=generator, dtype=torch.float64
                    )
                )
                run(proxy.model, {**proxy.inputs, name: states})
            except MISFITS:  # a decoder that was made without cross-attention
                continue
            proxy.inputs[name] = states
            return True
    return False
