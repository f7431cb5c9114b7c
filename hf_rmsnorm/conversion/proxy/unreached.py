"""Parameters that the inputs did not reach and that may yet write to the residual stream."""

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch.overrides import TorchFunctionMode

from ..plan import ConversionRefused
from .keys import KeyMap, ResidualWeight
from .layer_norms import Norms
from .model import ProxyModel, new_model, with_settings
from .run import MISFITS, alike, and_more, run, weight_axis
from .shift_invariance import all_centred, centre, shift_invariance_test


def behind_masks(
    work, proxy: ProxyModel, norms: Norms, undetermined: Iterable[str]
) -> tuple[list[ResidualWeight], set[str]]:
    """(residual weights that are used where inputs are masked, all undetermined parameters that are used there).

    The model inside is run, which may take a mask where the model with its head does not. `work` is the centred model;
    the residual weights are centred in it. `norms` are to have inputs without a mean afterwards.
    """
    left = set(undetermined)
    base = work.base_model
    prefix = next(f"{path}." if path else "" for path, module in work.named_modules() if module is base)
    inside = {path.removeprefix(prefix): norm for path, norm in norms.items() if path.startswith(prefix)}
    residual_weights: list[ResidualWeight] = []
    reached: set[str] = set()
    for inputs in _masked(base, proxy.inputs) if left else ():
        try:
            masked = shift_invariance_test(base, inputs, inside)
        except MISFITS:  # it takes no such mask
            continue
        more = [replace(weight, parameter=prefix + weight.parameter) for weight in masked.residual_weights]
        more = [weight for weight in more if weight.parameter in left]
        centre(work, more)
        if all_centred(base, inputs, inside):
            residual_weights += more
            reached |= {name for name in left if name.removeprefix(prefix) not in masked.undetermined}
    return residual_weights, reached


def _masked(model, inputs: dict) -> Iterator[dict]:
    """The inputs with a mask over every other patch of an image, or frame of a sound."""
    first = next(value for value in inputs.values() if isinstance(value, torch.Tensor))
    patch = getattr(model.config, "patch_size", None)
    if isinstance(patch, int) and first.ndim == 4:
        count = (first.shape[-2] // patch) * (first.shape[-1] // patch)
        yield {**inputs, "bool_masked_pos": _every_other(len(first), count)}
    lengths = getattr(model, "_get_feat_extract_output_lengths", None)
    if lengths is not None and first.ndim == 2:
        no_adapter = {"add_adapter": False} if "add_adapter" in inspect.signature(lengths).parameters else {}
        count = int(lengths(torch.tensor(first.shape[1]), **no_adapter))
        yield {**inputs, "mask_time_indices": _every_other(len(first), count)}


def _every_other(rows: int, count: int) -> torch.Tensor:
    return (torch.arange(count) % 2 == 0).repeat(rows, 1)


class _Used(TorchFunctionMode):
    """Notes the parameters that a forward computes with."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.used: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        reads_an_attribute = func.__name__ == "__get__" and not isinstance(result, torch.Tensor)
        if not reads_an_attribute:
            self._note((*args, *kwargs.values()))
        return result

    def _note(self, values) -> None:
        for value in values:
            if isinstance(value, (list, tuple)):
                self._note(value)
            elif id(value) in self.names:
                self.used.add(self.names[id(value)])


@torch.no_grad()
def unused(model: torch.nn.Module, inputs: dict) -> set[str]:
    """Parameters that the forward does not compute with. The norms' inputs tell of a mean that any other one causes."""
    with _Used(model) as noted:
        run(model, inputs)
    return {name for name, _ in model.named_parameters()} - noted.used


def refuse_if_unreached(work, proxy: ProxyModel, norms: Norms, undetermined: Iterable[str]) -> None:
    """Refuse where an unused parameter is as wide as the stream, so that it may write to it with other inputs."""
    lengths = {norm.hidden_size for norm in norms.values()}
    not_used = unused(work, proxy.inputs)
    left = [name for name in sorted(undetermined) if name in not_used and _may_write(proxy, name, lengths)]
    if not left:
        return
    kin = set(map(alike, proxy.shapes.keys() - set(undetermined)))  # which give no norm's input a mean
    # With tied embeddings a head's bias may have a second name, which is used only there.
    tied = with_settings(proxy.config, {"tie_word_embeddings": True})
    aliases = KeyMap(new_model(type(proxy.model), tied)).aliases
    known = {alias for name, alias in aliases.items() if name not in undetermined}
    left = [name for name in left if alike(name) not in kin and aliases.get(name) not in known]
    if left:
        what = f"the inputs made no use of {and_more(left)}; as wide as the residual stream, it may write to it"
        raise ConversionRefused(f"{proxy.name}: {what}: pass inputs=... that use it")


def _may_write(proxy: ProxyModel, name: str, lengths: set[int]) -> bool:
    """Whether an axis along which a parameter may write is as long as a row of the stream, or several."""
    path, _, leaf = name.rpartition(".")
    here, there = proxy.model.get_parameter(name).shape, proxy.shapes[name]
    axis = weight_axis(proxy.model.get_submodule(path)) if leaf == "weight" else None
    axes = range(len(here)) if axis is None else (axis,)
    return any(here[a] % n == 0 and there[a] % proxy.widths.get(n, n) == 0 for a in axes for n in lengths)
