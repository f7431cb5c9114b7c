"""Converted checkpoints: their LayerNorms run the RMSNorm that config.json records,
while that is the same.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from accelerate.utils import align_module_device, has_offloaded_params

from ..fused.recipe import Recipe
from ..ops.direct import DIRECT_TYPES
from ..record import (
    RECORD_KEY,
    TRAINED_AS_RMS,
    ResidualWeights,
    explain_violation,
    matching,
    own_names,
    trained_as_rms,
)

STAYS = "stays the LayerNorm that it is: "
TRAINED = "trained so, and a LayerNorm where it is loaded without a patch"
# Modules of hooks that move tensors and do not change their values.
_HARMLESS = ("transformers.", "torch.distributed.", "hf_rmsnorm.")
WITHOUT_WEIGHTS = "recorded as an RMSNorm, which it becomes when patched with its weights, if they are still centred"


@dataclass(frozen=True)
class Recorded:
    """A model with the record of its conversion.

    Attributes:
        outer: the model that was searched; `model` is it, or inside of it.
        head: prefix of the record's names before the model's own.
        norms: module path in `outer` -> eps, of each LayerNorm that is recorded as an
            RMSNorm.
    """

    outer: torch.nn.Module
    model: torch.nn.Module
    head: str
    record: dict
    norms: dict[str, float]

    @property
    def followed(self) -> bool:
        """Whether the norms are RMSNorms whatever the weights are."""
        return self.record.get("computes") == TRAINED_AS_RMS

    @property
    def trained(self) -> bool:
        """Whether training has made the norms RMSNorms."""
        return trained_as_rms(self.record)

    @cached_property
    def why_not(self) -> str:
        """That the record cannot be followed, and why; "" if it can."""
        if self.followed:
            return ""
        why_not = _why_not_followed(self) or outside_of(self.outer, self.model)
        return why_not if why_not in ("", WITHOUT_WEIGHTS) else STAYS + why_not


def conversion_of(model: torch.nn.Module) -> Recorded | None:
    """The conversion that the model's config, or that of a model inside it, records;
    None if there is none.
    """
    for path, module in model.named_modules():
        record = _record_of(module)
        if not isinstance(record, dict) or "rms_norms" not in record:
            continue
        record = {**record, "residual_weights": record.get("residual_weights") or {}}
        # A checkpoint saved with a head may be loaded without it, and the names then
        # lack the head's prefix.
        for head in ("", f"{getattr(module, 'base_model_prefix', '')}."):
            paths = {head + inner: inner for inner, _ in module.named_modules()}
            norms = matching(record["rms_norms"], paths)
            if norms:
                before = f"{path}." if path else ""
                eps = {before + paths[name]: how["eps"] for name, how in norms.items()}
                return Recorded(model, module, head, record, eps)
    return None


def _record_of(module: torch.nn.Module):
    return getattr(getattr(module, "config", None), RECORD_KEY, None)


def follow_conversion(model: torch.nn.Module, entries: list) -> None:
    """Give the norms of a converted model the formulas that its record says."""
    conversion = conversion_of(model)
    if conversion is None:
        return
    for entry in entries:
        recorded = [path for path in entry.paths if path in conversion.norms]
        if not recorded or entry.excluded:
            continue
        entry.required = conversion.trained
        if entry.recipe is not None:
            eps = conversion.norms[recorded[0]]
            entry.recipe, entry.note = _as_recorded(entry, eps, conversion)


def _as_recorded(entry, eps: float, conversion: Recorded) -> tuple[Recipe, str]:
    """(the recipe of a norm that is recorded with this eps, a note for the report)."""
    recipe = entry.recipe
    why_not = conversion.why_not
    note = TRAINED if conversion.trained else ""
    if recipe.as_rms:
        doubt = why_not.removeprefix(STAYS)
        if doubt:
            note = f"runs as RMSNorm, but {doubt}; unpatch and patch again"
        return recipe, note
    if entry.patched or not recipe.spec.centered:
        return recipe, ""
    if why_not:
        return recipe, why_not
    if eps != recipe.spec.eps:
        what = f"its eps is {recipe.spec.eps:g}, the record says {eps:g}"
        return recipe, f"{STAYS}{what}"
    spec = replace(recipe.spec, centered=False)
    return replace(recipe, spec=spec, as_rms=True), note


def outside_of(model: torch.nn.Module, converted: torch.nn.Module) -> str:
    """Why what surrounds the converted model is in the way: it may hand it a residual
    stream that has a mean.
    """
    record = _record_of(converted)
    for module in model.modules():
        # With a head, maybe: the first of this record by its own class. A wrapper, of
        # PEFT say, may only pass it on.
        if hasattr(type(module), "base_model_prefix") and _record_of(module) == record:
            converted = module
            break
    inside = {id(parameter) for parameter in converted.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            what = f"{name} is outside of the {type(converted).__name__} that was converted"
            may = "and may write to its residual stream"
            return f"{what} {may}; where it does not, patch that model by itself"
    return ""


def _why_not_followed(recorded: Recorded) -> str:
    """Why the record of a model cannot be followed, by the model itself."""
    tensors = Weights(recorded.model, recorded.head)
    for name, (module, key) in tensors.data.items():
        tensor = module._parameters[key]
        if tensor.is_meta and not has_offloaded_params(module):
            return WITHOUT_WEIGHTS
        if type(tensor) not in DIRECT_TYPES or not tensor.numel():
            return f"{name} is not here whole; patch once the weights are loaded"
    try:
        return tensors.hooked(recorded.record) or moved(tensors, recorded.record)
    except ValueError as error:
        return str(error)


def moved(tensors: Weights, record: dict) -> str:
    """Why the residual weights, or the tensors that adapters add to them, are not
    centred; "" if all are.
    """
    if not record["residual_weights"]:
        return "its record names nothing that writes to the residual stream; convert the original again"
    names = own_names(tensors)
    own = copy(tensors)
    own.data = {new: tensors.data[old] for old, new in names.items()}
    why_not = explain_violation(own, record)
    if why_not:
        return why_not
    residual_weights, added, how = ResidualWeights(record, own), {}, {}
    for name in tensors:  # of all adapters, as others may become active after the patch
        change = None if name in names else residual_weights.changed_by(name)
        if change is not None:
            weight, how[name] = change
            added[name] = tensors[name].to(own[weight].dtype)  # in which it writes
    why_not = explain_violation(added, {**record, "residual_weights": how})
    return why_not and f"{why_not}; merge the adapter, and convert the merged model"


class Weights(UserDict):
    """A model's parameters by name; one that accelerate keeps on a disk is read when it
    is asked for. `data`: name -> (its module, its name there).
    """

    def __init__(self, model: torch.nn.Module, head: str):
        super().__init__()
        for path, module in model.named_modules(remove_duplicate=False):
            before = f"{head}{path}." if path else head
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.data[before + name] = module, name

    def __getitem__(self, key: str) -> torch.Tensor:
        module, name = self.data[key]
        with align_module_device(module):
            return module._parameters[name]

    def hooked(self, record: Mapping) -> str:
        """Why a hook is in the way: on a module that writes to the residual stream it
        may add what has a mean.
        """
        for key in ResidualWeights(record, self.data).how:
            module, _ = self.data[key]
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                homes = [getattr(h, "__module__", None) or "" for h in hooks.values()]
                if not all(home.startswith(_HARMLESS) for home in homes):
                    what = f"{key.rpartition('.')[0]} has a hook"
                    return f"{what}, which may change what it writes to the residual stream"
        return ""
