"""Converted checkpoints: their LayerNorms run the RMSNorm that config.json records,
while that is the same.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace

import torch
from accelerate.utils import align_module_device, has_offloaded_params

from ..fused.recipe import Recipe
from ..ops.direct import DIRECT_TYPES
from ..record import (
    RECORD_KEY,
    TRAINED_AS_RMS,
    ResidualWeights,
    explain_violation,
    own_names,
    recorded_norms,
    trained_as_rms,
)

STAYS = "stays the LayerNorm that it is: "
TRAINED = "trained so, and a LayerNorm where it is loaded without a patch"
# Modules of hooks that move tensors and do not change their values.
_HARMLESS = ("transformers.", "torch.distributed.", "hf_rmsnorm.")
WITHOUT_WEIGHTS = "recorded as an RMSNorm, which it becomes when patched with its weights, if they are still centred"


@dataclass(frozen=True)
class ConvertedNorms:
    """The norms that a model's record lists."""

    # module path -> eps, of each LayerNorm that is recorded as an RMSNorm
    norms: dict[str, float]
    why_not: str = ""  # that the record cannot be followed, and why
    # training has made the model one of RMSNorms, by the record: its weights may have
    # any mean
    trained: bool = False

    @property
    def note(self) -> str:
        """The note of a report on a norm that runs as RMSNorm."""
        return TRAINED if self.trained else ""

    def recipe(self, paths: list[str], recipe: Recipe) -> tuple[Recipe, str]:
        """(the recipe to swap in, a note for the report) for a norm that was recognised
        as `recipe`.
        """
        eps = next((self.norms[path] for path in paths if path in self.norms), None)
        if eps is None or not recipe.spec.centered:
            return recipe, ""
        if self.why_not:
            return recipe, self.why_not
        if eps != recipe.spec.eps:
            return (
                recipe,
                f"{STAYS}its eps is {recipe.spec.eps:g}, the record says {eps:g}",
            )
        return replace(
            recipe, spec=replace(recipe.spec, centered=False), as_rms=True
        ), self.note


@dataclass(frozen=True)
class Recorded:
    """A model with the record of its conversion."""

    path: str  # of the model, inside of the one that was searched
    model: torch.nn.Module
    head: str  # prefix of the record's names before the model's own
    record: dict
    # as in the record, by the record's names: path -> ``{"eps", "hidden_size"}``
    norms: dict[str, dict]

    @property
    def followed(self) -> bool:
        """Whether the norms are RMSNorms whatever the weights are."""
        return self.record.get("computes") == TRAINED_AS_RMS

    def full_path(self, path: str) -> str:
        """The path, in the model that was searched, of a module that the record names."""
        own = path[len(self.head) :]
        return f"{self.path}.{own}" if self.path else own


def recorded_model(model: torch.nn.Module) -> Recorded | None:
    """The model, or the one inside it, whose config records a conversion; None if there
    is none.
    """
    for path, module in model.named_modules():
        record = getattr(getattr(module, "config", None), RECORD_KEY, None)
        if isinstance(record, dict) and "rms_norms" in record:
            record = {
                **record,
                "residual_weights": record.get("residual_weights") or {},
            }
            # A checkpoint saved with a head may be loaded without it, and the names
            # then lack the head's prefix.
            for head in ("", f"{getattr(module, 'base_model_prefix', '')}."):
                if norms := recorded_norms(
                    record, [head + inner for inner, _ in module.named_modules()]
                ):
                    return Recorded(path, module, head, record, norms)
    return None


def conversion_of(model: torch.nn.Module) -> ConvertedNorms | None:
    """The conversion that the model's config, or that of a model inside it, records;
    None if there is none.
    """
    if (found := recorded_model(model)) is None:
        return None
    norms = {found.full_path(path): how["eps"] for path, how in found.norms.items()}
    if found.followed:
        return ConvertedNorms(norms, trained=trained_as_rms(found.record))
    why_not = _why_not_followed(found) or outside_of(model, found.model)
    return ConvertedNorms(
        norms, why_not if why_not in ("", WITHOUT_WEIGHTS) else STAYS + why_not
    )


def outside_of(model: torch.nn.Module, converted: torch.nn.Module) -> str:
    """Why what surrounds the converted model is in the way: it may hand it a residual
    stream that has a mean.
    """
    record = getattr(converted.config, RECORD_KEY)
    # With a head, maybe: the first of this record by its own class. A wrapper, of PEFT
    # say, may only pass it on.
    owners = (m for m in model.modules() if hasattr(type(m), "base_model_prefix"))
    converted = next(
        (
            m
            for m in owners
            if getattr(getattr(m, "config", None), RECORD_KEY, None) == record
        ),
        converted,
    )
    inside = {id(parameter) for parameter in converted.parameters()}
    name = next(
        (
            name
            for name, parameter in model.named_parameters()
            if id(parameter) not in inside
        ),
        None,
    )
    told = f"{name} is outside of the {type(converted).__name__} that was converted"
    told += " and may write to its residual stream; where it does not, patch that model by itself"
    return "" if name is None else told


def _why_not_followed(found: Recorded) -> str:
    """Why the record of a model cannot be followed, by the model itself."""
    tensors = Weights(found.model, found.head)
    if hidden := tensors.hidden():
        away = found.model.get_parameter(hidden[len(found.head) :]).is_meta
        return (
            WITHOUT_WEIGHTS
            if away
            else f"{hidden} is not here whole; patch once the weights are loaded"
        )
    try:
        return tensors.hooked(found.record) or moved(tensors, found.record)
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
    if why_not := explain_violation(own, record):
        return why_not
    residual_weights, added, how = ResidualWeights(record, own), {}, {}
    for name in tensors:  # of all adapters, as others may become active after the patch
        change = None if name in names else residual_weights.changed_by(name)
        if change is not None:
            weight, how[name] = change
            added[name] = tensors[name].to(own[weight].dtype)  # in which it writes
    why_not = explain_violation(added, {**record, "residual_weights": how})
    return why_not and f"{why_not}; convert an adapter with its base (convert_adapter)"


class Weights(UserDict):
    """A model's parameters by name; one that accelerate keeps on a disk is read when it
    is asked for.
    """

    def __init__(self, model: torch.nn.Module, head: str):
        self.model, self.head = model, head
        # Parameter -> (its module, its name there).
        self.data = {
            f"{head}{path}.{name}" if path else head + name: (module, name)
            for path, module in model.named_modules(remove_duplicate=False)
            for name in module._parameters
            if module._parameters[name] is not None
        }

    def __getitem__(self, key: str) -> torch.Tensor:
        module, name = self.data[key]
        with align_module_device(module):
            return module._parameters[name]

    def hooked(self, record: Mapping) -> str:
        """Why a hook is in the way: on a module that writes to the residual stream it
        may add what has a mean.
        """
        modules = {
            key.rpartition(".")[0]: self.data[key][0]
            for key in ResidualWeights(record, self.data).how
        }
        for path, module in modules.items():
            hooks = (
                *module._forward_hooks.values(),
                *module._forward_pre_hooks.values(),
            )
            if any(
                not (getattr(hook, "__module__", None) or "").startswith(_HARMLESS)
                for hook in hooks
            ):
                return f"{path} has a hook, which may change what it writes to the residual stream"
        return ""

    def hidden(self) -> str:
        """The first parameter that cannot be looked at, "" if there is none."""
        for key, (module, name) in self.data.items():
            tensor = module._parameters[name]
            away = tensor.is_meta and not has_offloaded_params(module)
            if away or type(tensor) not in DIRECT_TYPES or not tensor.numel():
                return key
        return ""
