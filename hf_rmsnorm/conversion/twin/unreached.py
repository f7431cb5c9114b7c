"""Parameters that the inputs did not reach and that may yet write to the residual stream."""

import inspect
import types
from collections.abc import Iterator
from dataclasses import replace

import torch

from ..plan import ConversionRefused
from .gauge import Gauge, all_centred, centre, gauge_test
from .keys import Hit, KeyMap
from .layer_norms import Norms
from .run import MISFITS, alike, and_more, run, weight_axis
from .twin import Twin, new_model, with_settings


def behind_masks(work, twin: Twin, norms: Norms, gauge: Gauge) -> tuple[list[Hit], set[str]]:
    """What is to be centred besides where some of the inputs are masked, and all parameters that were reached so and
    leave the inputs of the norms, which are to become RMSNorms, without mean.

    The model inside is run, which may take a mask where the model with its head does not. `work` is the twin's model,
    centred so far; what is found is centred in it.
    """
    left = set(gauge.undetermined)
    base = work.base_model
    prefix = next(f"{path}." if path else "" for path, module in work.named_modules() if module is base)
    inside = {path.removeprefix(prefix): norm for path, norm in norms.items() if path.startswith(prefix)}
    found: list[Hit] = []
    reached: set[str] = set()
    for inputs in _masked(base, twin.inputs) if left else ():
        try:
            masked = gauge_test(base, inputs, inside)
        except MISFITS:  # it takes no such mask
            continue
        hits = [replace(hit, parameter=prefix + hit.parameter) for hit in masked.hits]
        hits = [hit for hit in hits if hit.parameter in left]
        centre(work, hits)
        if all_centred(base, inputs, inside):
            found += hits
            reached |= {name for name in left if name.removeprefix(prefix) not in masked.undetermined}
    return found, reached


def _masked(model, inputs: dict) -> Iterator[dict]:
    """The inputs with a mask over every other patch of an image, or frame of a sound."""
    first = next(v for v in inputs.values() if isinstance(v, torch.Tensor))
    patch, lengths = getattr(model.config, "patch_size", None), getattr(model, "_get_feat_extract_output_lengths", None)
    if isinstance(patch, int) and first.ndim == 4:
        count = (first.shape[-2] // patch) * (first.shape[-1] // patch)
        yield {**inputs, "bool_masked_pos": (torch.arange(count) % 2 == 0).repeat(len(first), 1)}
    if lengths is not None and first.ndim == 2:
        own = {"add_adapter": False} if "add_adapter" in inspect.signature(lengths).parameters else {}
        count = int(lengths(torch.tensor(first.shape[1]), **own))
        yield {**inputs, "mask_time_indices": (torch.arange(count) % 2 == 0).repeat(len(first), 1)}


def refuse_if_unreached(work, twin: Twin, norms: Norms, gauge: Gauge, reached: set[str]) -> None:
    """Refuse where a parameter that no input reached is as wide as the stream; the arguments are `behind_masks`'s."""
    lengths = {norm.hidden_size for norm in norms.values()}
    left = [name for name in gauge.undetermined if name not in reached and _may_write(twin, name, lengths)]
    if not left:
        return
    kin = set(map(alike, twin.shapes.keys() - set(gauge.undetermined)))  # which give no norm's input a mean
    # With tied embeddings a head's bias may have a second name, which is used only there.
    tied = with_settings(twin.config, {"tie_word_embeddings": True})
    mentioned, aliases = _mentioned(twin.model), KeyMap(new_model(type(twin.model), tied)).aliases
    used = {alias for name, alias in aliases.items() if name not in gauge.undetermined}
    left = [name for name in left if alike(name) not in kin and aliases.get(name) not in used]
    left = [name for name in left if all(part.isdecimal() or part in mentioned for part in name.split("."))]
    if left := [name for name in left if not _only_chooses(work, twin, norms, name)]:
        what = f"the inputs made no use of {and_more(left)}; as wide as the residual stream, it may write to it"
        raise ConversionRefused(f"{twin.name}: {what}: pass inputs that use it (the argument inputs)")


@torch.no_grad()
def _only_chooses(work, twin: Twin, norms, name: str) -> bool:
    """Whether other values of a parameter without gradient change the outputs, and give no norm's input a mean.

    So do those of a router or of a codebook: they choose what writes to the stream.
    """
    parameter = work.get_parameter(name)
    before, outputs = parameter.clone(), run(work, twin.inputs)
    parameter.copy_(10 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4), dtype=before.dtype))
    try:
        changed = any(not torch.equal(a, b) for a, b in zip(outputs, run(work, twin.inputs), strict=True))
        return changed and all_centred(work, twin.inputs, norms)
    except MISFITS:  # as values that choose a length may be too large
        return False
    finally:
        parameter.copy_(before)


def _mentioned(model: torch.nn.Module) -> set[str]:
    """Every name and string in the code of the modules' classes, but for what makes and initialises modules."""
    names: set[str] = set()
    for cls in {cls for module in model.modules() for cls in type(module).__mro__}:
        for name, member in vars(cls).items():
            function = inspect.unwrap(getattr(member, "fget", None) or getattr(member, "__func__", member))
            if name not in ("__init__", "_init_weights") and (code := getattr(function, "__code__", None)):
                for inner in _codes(code):
                    names.update(inner.co_names, (c for c in inner.co_consts if isinstance(c, str)))
    return names


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Some code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _may_write(twin: Twin, name: str, lengths: set[int]) -> bool:
    """Whether an axis along which a parameter may write is as long as a row of the stream, or several."""
    path, _, leaf = name.rpartition(".")
    here, there = twin.model.get_parameter(name).shape, twin.shapes[name]
    axis = weight_axis(twin.model.get_submodule(path)) if leaf == "weight" else None
    axes = range(len(here)) if axis is None else (axis,)
    return any(here[a] % n == 0 and there[a] % twin.widths.get(n, n) == 0 for a in axes for n in lengths)
