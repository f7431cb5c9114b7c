"""Patch each model that a program loads: what `hf-rmsnorm run` exchanges to see them."""

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from importlib.util import find_spec

from torch.nn import Module
from tqdm import tqdm
from transformers import PreTrainedModel, trainer

from ..patching import PatchReport, is_patched, patch_model
from .trainer import HfRmsNormCallback

# A model may load its parts by the same methods: it is patched once it is whole.
_is_loading: ContextVar[bool] = ContextVar("_is_loading", default=False)


class Models:
    """Patches the models of a program, and says so on stderr, a line for each.

    Args:
        options: keyword arguments of `patch_model`.

    Attributes:
        any_patched: whether a norm of any model was swapped.
    """

    def __init__(self, **options):
        self.options = options
        self.any_patched = False

    def patch(self, model: Module) -> PatchReport:
        """The report of a model; an empty one where it cannot be patched, and says so."""
        is_known = is_patched(model)
        name = type(model).__name__
        try:
            with warnings.catch_warnings():  # which the line says
                warnings.filterwarnings("ignore", "patch_model changed no norm")
                report = patch_model(model, **self.options)
        except Exception as error:  # the program runs on
            reason = " ".join(str(error).split())
            say(f"{name} is not patched: {type(error).__name__}: {reason}")
            return PatchReport()
        self.any_patched |= bool(report.swapped)
        if not is_known:
            say(f"{name}: {report.in_one_line}")
        return report


class ProgramCallback(HfRmsNormCallback):
    """`HfRmsNormCallback` of each Trainer of a program: it patches a model made by its
    class, and reports no model twice.
    """

    def __init__(self, models: Models):
        super().__init__(**models.options)
        self._models = models

    def _swap(self, model: Module, liger: bool) -> PatchReport:
        return self._models.patch(model)

    def _say(self, line: str) -> None:
        """The line is that of `Models`."""


@contextlib.contextmanager
def every_model_patched(**options) -> Iterator[Models]:
    """Patch each model that this process loads meanwhile: `Models` says which.

    Exchanged, and given back at the end: `PreTrainedModel.from_pretrained` and
    `_from_config`, in which those of all Auto classes and pipelines end;
    ``DEFAULT_CALLBACKS`` of `transformers.trainer`; and where diffusers is installed,
    `ModelMixin.from_pretrained`, `ConfigMixin.from_config` and
    `FromOriginalModelMixin.from_single_file`.
    """
    models = Models(**options)
    callbacks = [*trainer.DEFAULT_CALLBACKS, ProgramCallback(models)]
    exchanges = [(trainer, "DEFAULT_CALLBACKS", callbacks)]
    for owner, name in _loaders():
        exchanges.append((owner, name, _patching(vars(owner)[name], models)))
    with contextlib.ExitStack() as stack:
        for owner, name, value in exchanges:
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)
        yield models


def _loaders() -> list[tuple[type, str]]:
    """The classmethods in which each way to load or make a model ends."""
    found = [(PreTrainedModel, "from_pretrained"), (PreTrainedModel, "_from_config")]
    if find_spec("diffusers") is not None:
        from diffusers.configuration_utils import ConfigMixin
        from diffusers.loaders.single_file_model import FromOriginalModelMixin
        from diffusers.models.modeling_utils import ModelMixin

        found.append((ModelMixin, "from_pretrained"))
        found.append((ConfigMixin, "from_config"))  # of schedulers too
        found.append((FromOriginalModelMixin, "from_single_file"))
    return found


def _patching(method: classmethod, models: Models) -> classmethod:
    """A classmethod that patches the model that the method returns."""
    function = method.__func__

    @functools.wraps(function)
    def load(cls, *args, **kwargs):
        if _is_loading.get():
            return function(cls, *args, **kwargs)
        token = _is_loading.set(True)
        try:
            result = function(cls, *args, **kwargs)
        finally:
            _is_loading.reset(token)
        # some return how the loading went as well
        model = result[0] if isinstance(result, tuple) else result
        if isinstance(model, Module):
            models.patch(model)
        return result

    return classmethod(load)


def say(text: str) -> None:
    """Print a line on stderr, on none that shows the progress of loading."""
    tqdm.write(f"hf_rmsnorm: {text}", file=sys.stderr)
