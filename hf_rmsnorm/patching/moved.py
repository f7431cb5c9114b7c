"""Says once that a converted model has moved since it was patched: its RMSNorms are then other functions."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate

import torch

from ..ops.direct import version
from ..record import Writers, is_centred, own_names
from .centring import centre_at
from .converted import STAYS, WITHOUT_WEIGHTS, Recorded, Weights, conversion_of, recorded_model

_is_compiling = torch.compiler.is_compiling
CURE = "patch it again for its LayerNorms, keep it centred by Recentre, or call train_as_rms before the patch"


class MovedCheck:
    """A hook that looks, before each forward, whether parameters were written to, or modules exchanged.

    Where they were, it reads the weights as `patch_model` did. It warns and removes itself where they are no longer
    centred. It also warns where a caller gives embeddings that have a mean.
    """

    def __init__(self, model: torch.nn.Module):
        self.places = [*_places(model)]

    def __call__(self, model: torch.nn.Module, args, kwargs) -> None:
        if _is_compiling():
            return
        doubt, embeds = "", kwargs.get("inputs_embeds")
        if any(held.get(name) is not what or version_of(what) != then for held, name, what, then in self.places):
            conversion = conversion_of(model)
            doubt = "" if conversion is None else conversion.doubt.removeprefix(STAYS)
            self.places = [*_places(model)]
            if conversion is not None and not doubt:  # the module itself may be another, as after resizing a table
                centre_at(model, conversion.centred, ExitStack())
        if torch.is_tensor(embeds) and not doubt and not is_centred(embeds, embeds.ndim - 1, embeds.shape[-1], None):
            doubt = "the inputs_embeds that it is given have a mean"
        if doubt and doubt != WITHOUT_WEIGHTS:
            unwatch(model)
            what = f"this converted {type(model).__name__} runs as RMSNorm, and is no longer what it was"
            warnings.warn(f"{what}: {doubt}; {CURE}", stacklevel=2)


def version_of(what) -> int | None:
    """What a write to a parameter moves; None for a module."""
    return version(what) if isinstance(what, torch.Tensor) else None


def _places(model: torch.nn.Module) -> Iterator[tuple]:
    """(dictionary, key, what it holds, version) of each parameter of modules that write, and of the modules above."""
    found = recorded_model(model)
    tensors = Weights(model, found.head)
    writers = {name.rpartition(".")[0] for name in Writers(found.record, own_names(tensors).values()).how}
    for key, (module, name) in tensors.data.items():
        if not writers.isdisjoint(accumulate(key.split("."), "{}.{}".format)):  # or it was added to one that writes
            yield module._parameters, name, module._parameters[name], version_of(module._parameters[name])
    paths = [each[len(found.head) :] for each in (*writers, *found.record.get("centred", {}))]
    above = {path for each in paths for path in accumulate(each.split("."), "{}.{}".format)}
    for path in sorted(above):
        parent, _, child = path.rpartition(".")
        holder = model.get_submodule(parent)._modules
        yield holder, child, holder[child], None


def watch(found: Recorded, undo: ExitStack) -> None:
    """Put a `MovedCheck` on a converted model; `undo` gets what removes it."""
    if not (found.followed or any(isinstance(hook, MovedCheck) for hook in found.model._forward_pre_hooks.values())):
        found.model.register_forward_pre_hook(MovedCheck(found.model), with_kwargs=True)
        undo.callback(unwatch, found.model)


def unwatch(model: torch.nn.Module) -> None:
    """Remove it."""
    for number, hook in [*model._forward_pre_hooks.items()]:
        if isinstance(hook, MovedCheck):
            del model._forward_pre_hooks[number]
            model._forward_pre_hooks_with_kwargs.pop(number, None)
