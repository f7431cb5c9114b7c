"""Which layers of a model have their sums fused, and which norm reads what each of them returns."""

import contextlib
import inspect
import re

import torch
from torch import nn

from ...fused.layer import Fusion, layer_part, link
from ...fused.norm import recipe_of
from ...fused.source import CannotRewrite
from ...ops.backend import MAX_HEAD_DIM
from ..formula.probe import neutral_modes
from ..report import FusedLayer
from ..swap import fuse, replaced_forward, unfused
from .qk import QKFusion, QKRefusal, find_qk
from .sums import NO_SUM, find_fusion, norms_of


def fuse_layers(model: nn.Module, undo: contextlib.ExitStack) -> tuple[FusedLayer, ...]:
    """Fuse the sums of every layer of a patched model that allows it, and link the layers; `undo` is told how to."""
    places = [(None, "", model), *((p, *named) for p in model.modules() for named in p.named_children())]
    rows = [(p, name, row) for p, name, row in places if isinstance(row, (nn.ModuleList, nn.Sequential))]
    rows = [(p, name, [m for m in row if m is not None]) for p, name, row in rows]  # a place may hold None
    in_rows = {_inner(module) for _, _, row in rows for module in row}
    layers = {m: (path, _examine(m, m in in_rows)) for path, m in model.named_modules() if norms_of(m)}
    sums = {m: found if isinstance(found, Fusion) else Fusion(()) for m, (_, found) in layers.items()}
    behind = _behind_each(rows, sums)
    told: dict[str, tuple[str, str]] = {}  # path -> (what is fused, why nothing is)
    for module, (path, found) in layers.items():
        reason = found if isinstance(found, str) else ""
        inside = [f"+ {reader}" for _, reader in sums[module].sites if reader]
        inside += [str(found)] if isinstance(found, QKFusion) else []
        if inside or module in behind:
            try:
                undo.callback(fuse, module, getattr(type(module), "_hf_rmsnorm_fusion", None))
                fuse(module, found)  # one of an earlier patch, when other norms were swapped, goes
                if module in behind:
                    reader, owner = behind[module]
                    link(module, owner, reader)
                    inside.append("+ the norm behind it")
            except Exception as error:  # a metaclass or __init_subclass__ of the user's may refuse in any way
                reason = str(error) if isinstance(error, CannotRewrite) else f"{type(error).__name__}: {error}"
        if inside and not reason:
            told[path] = ", ".join(inside), ""
        elif module in in_rows or isinstance(found, QKRefusal):
            reads = "no patched norm is known to read the sum that it returns" if sums[module].sites else NO_SUM
            told[path] = "", reason or reads
    further_in = _with_norms_further_in(model, in_rows, set(told))
    told.update((path, ("", reason)) for path, reason in further_in.items())
    return tuple(FusedLayer(path, type(m).__name__, *told[path]) for path, m in model.named_modules() if path in told)


def _with_norms_further_in(model: nn.Module, in_rows: set[nn.Module], told: set[str]) -> dict[str, str]:
    """Of the layers that hold patched norms, and nothing was told of: path -> why none of their sums is fused."""
    names = {path for path, module in model.named_modules() if module in in_rows}
    held: dict[str, list[str]] = {}
    for path in (path for path, module in model.named_modules() if recipe_of(module) is not None):
        parents = [path[: dot.start()] for dot in re.finditer(r"\.", path)]
        layer = next((parent for parent in reversed(parents) if parent in names), None)
        if layer is not None and told.isdisjoint(parent for parent in parents if parent.startswith(layer)):
            held.setdefault(layer, []).append(path[len(layer) + 1 :].rpartition(".")[0])
    return {
        layer: "no launch serves a sum with norms like its own, as their formula or notes say"
        if "" in inside
        else f"its norms are in {', '.join(dict.fromkeys(inside))}: sums are fused where a layer itself calls the norm"
        for layer, inside in held.items()
    }


def _inner(module: nn.Module) -> nn.Module:
    """The layer in its wrappers (FSDP, activation checkpoints, `torch.compile`): an only child by a private name."""
    while len(module._modules) == 1:
        ((name, child),) = module._modules.items()
        if child is None or not name.startswith("_"):
            break
        module = child
    return module


def _examine(module: nn.Module, in_row: bool) -> Fusion | QKFusion | str:
    """What is found of a module with norms among its children, or why nothing is."""
    part = layer_part(type(module))
    if part is not None and part._hf_rmsnorm_layer_base.forward is not part._hf_rmsnorm_original:
        return "its class was given another forward: unpatch the model and patch it again"
    if other := replaced_forward(module):
        return f"its forward was replaced on the instance by {other}"
    try:
        with neutral_modes(), torch.random.fork_rng(devices=[]):
            # Only what models repeat is run on stand-ins: the forward of a whole model may do more than compute.
            found = find_fusion(module) if in_row else Fusion(())
            if isinstance(found, str) or not found.sites:
                with contextlib.suppress(CannotRewrite):
                    return find_qk(unfused(type(module)), _heads(module), module._modules)
            return found
    except Exception as error:  # whatever a user's class does, its norms are swapped
        return f"it could not be examined: {type(error).__name__}: {error}"


def _heads(attention: nn.Module) -> set[str]:
    """The norms among its children that are short enough for heads and bear a weight alone or nothing.

    Not `F.rms_norm`, whose output is contiguous: put off to behind a transpose, it would lie otherwise in memory.
    """
    found = ((name, recipe_of(norm).spec, norm.parameters(recurse=False)) for name, norm in norms_of(attention).items())
    plain = ((name, weights) for name, spec, weights in found if not spec.has_bias and not spec.functional)
    return {name for name, weights in plain if all(p.dim() == 1 and len(p) <= MAX_HEAD_DIM for p in weights)}


def _behind_each(rows, sums: dict[nn.Module, Fusion]) -> dict[nn.Module, tuple[str, nn.Module]]:
    """Layer -> (name of the norm that reads what it returns, the module whose child that is)."""
    behind: dict[nn.Module, tuple[str, nn.Module]] = {}
    for parent, name, row in rows:
        for here, there in zip(row, [*row[1:], None], strict=False):  # a row may be empty
            if here not in sums or all(reader for _, reader in sums[here].sites):
                continue
            if there is None:
                reader, owner = _called_last(parent, name), parent
            else:
                reader, owner = sums[there].entry if there in sums else "", there
            if reader:
                behind[here] = reader, owner
    return behind


def _called_last(parent: nn.Module | None, layers: str) -> str:
    """The patched norm among `parent`'s children that its forward calls last, after it has named `layers`; or ""."""
    try:
        source = "" if parent is None else inspect.getsource(inspect.unwrap(type(parent).forward))
    except (OSError, TypeError):
        return ""
    at = {name: source.rfind(f"self.{name}(") for name in (norms_of(parent) if source else ())}
    name = max(at, key=at.get, default="")
    return name if name and at[name] > source.find(f"self.{layers}") >= 0 else ""
