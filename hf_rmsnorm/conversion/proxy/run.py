"""Run a model of Transformers in float64, look at what its modules take and give, and
take its outputs apart. Every step on a proxy model runs it by `run`.
"""

import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.utils import logging

from ...verification.context import output_tensors
from ...verification.float64 import Float64Mode, default_dtype

# What any constructor or forward may raise on sizes that do not suit it.
MISFITS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    StrictDataclassError,
)


class LimitedWork(TorchDispatchMode):
    """Inside, whenever it is entered, operators make so many numbers in all.

    Raises:
        RuntimeError: they make more.
    """

    def __init__(self, most: int):
        super().__init__()
        self.most = most
        self.left = most

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        if func.is_view:
            return y
        made = [leaf for leaf in tree_leaves(y) if isinstance(leaf, torch.Tensor)]
        self.left -= sum(tensor.numel() for tensor in made)
        if self.left < 0:
            raise RuntimeError(f"it makes more than {self.most:,} numbers")
        return y


@contextmanager
def in_double():
    """Casts of a forward to a narrower float have no effect, and new tensors are
    float64; gradients pass.
    """
    with default_dtype(torch.float64), Float64Mode():
        yield


def run(
    model: torch.nn.Module, inputs: dict, paths: Iterable[str] = (), hook=None
) -> list[torch.Tensor]:
    """The model's outputs in float64: logits and whatever else is no cache, loss or
    hidden state; with gradients.

    Meanwhile ``hook(path, args, output)`` is called after each forward of the modules
    at `paths`; what it returns, if not None, becomes the output.
    """
    with in_double(), torch.random.fork_rng(devices=[]), _hooked(model, paths, hook):
        torch.manual_seed(0)  # some models mask at random in eval mode too
        outputs = list(output_tensors(model(**inputs)))
    if not outputs:
        raise ValueError("the model returned no floating tensor")
    for output in outputs:
        if output.numel() and not torch.isfinite(output).any():
            raise ValueError("the model's outputs are not finite")
    return [torch.where(torch.isfinite(o), o, 0.0) for o in outputs]


@contextmanager
def _hooked(model, paths, hook):
    """Inside, the hook is on the modules at `paths`, before others, as `run` says."""

    def called(path, module, args, kwargs, output):
        return hook(path, (*args, *kwargs.values()), output)

    with ExitStack() as stack:
        for path in paths:
            register = model.get_submodule(path).register_forward_hook
            handle = register(partial(called, path), prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
        yield


@contextmanager
def quiet():
    """No progress bars of Transformers, and no reports of missing tensors: the callers
    look at those.
    """
    shown = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def loaded(cls, folder, **kwargs) -> tuple[PreTrainedModel, dict]:
    """(model in eval mode, what Transformers says of the loading); the arguments are
    those of `from_pretrained`.
    """
    with quiet():
        model, info = cls.from_pretrained(folder, **kwargs, output_loading_info=True)
    return model.eval(), info


def and_more(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    others = f" and {len(names) - 1} more" if names[1:] else ""
    return f"{names[0]!r}{others}"


def alike(name: str) -> str:
    """A name with its numbers taken out: equal for parameters that differ in layer or
    expert alone.
    """
    return re.sub(r"\d+", "*", name)
