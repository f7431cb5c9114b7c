"""Which layers of a model have their sums fused, and which norm reads what each of them returns."""

import contextlib
import inspect
import re
from dataclasses import replace

import torch
from torch import nn

from ...fused.layer import Fusion, layer_part, link
from ...fused.norm import fusible_recipe, recipe_of
from ...fused.source import CannotRewrite
from ...ops.backend import MAX_HEAD_DIM, MAX_TOKEN
from ..formula.probe import neutral_modes
from ..report import FusedLayer
from ..swap import fuse, fuse_again, replaced_forward, unfused
from .modulation import ModulationFusion, find_modulations
from .qk import QKFusion, QKRefusal, TurnFusion, find_qk
from .sums import NO_SUM, LayerFlow, find_flow, norms_of, structure

UNREAD = "no patched norm is known to read the sum that it returns"


class Sources:
    """What the sources of modules show of norms, read once for all modules that are alike in one patch."""

    def __init__(self):
        self.modulations: dict[tuple, ModulationFusion | None] = {}
        self.qk: dict[tuple, tuple[object, str]] = {}

    def modulation_of(self, module: nn.Module) -> ModulationFusion | None:
        """`find_modulations` of a module; None where its forward has no source."""
        key = structure(module)
        if key not in self.modulations:
            self.modulations[key] = None
            with contextlib.suppress(CannotRewrite):  # which is said where sums are looked for
                self.modulations[key] = find_modulations(unfused(type(module)), _of_rows(module))
        return self.modulations[key]

    def qk_of(self, module: nn.Module) -> tuple[object, str]:
        """(`_find_qk` of a module, why it cannot be rewritten): one of the two is empty."""
        key = structure(module)
        if key not in self.qk:
            try:
                self.qk[key] = _find_qk(module), ""
            except CannotRewrite as error:
                # Not the error itself: its traceback would keep the whole model alive.
                self.qk[key] = None, str(error)
        return self.qk[key]


def fuse_layers(model: nn.Module, undo: contextlib.ExitStack) -> tuple[FusedLayer, ...]:
    """Fuse the sums of every layer of a patched model that allows it, and link the layers; `undo` is told how to."""
    places = [(None, "", model), *((p, *named) for p in model.modules() for named in p.named_children())]
    rows = [(p, name, row) for p, name, row in places if isinstance(row, (nn.ModuleList, nn.Sequential))]
    rows = [(p, name, [m for m in row if m is not None]) for p, name, row in rows]  # a place may hold None
    in_rows = {_inner(module) for _, _, row in rows for module in row}
    # Only what models repeat is run on stand-ins: the forward of a whole model may do more than compute.
    repeated = {module for layer in in_rows for module in layer.modules()}
    named = dict(model.named_modules())
    holders = {
        path[: dot.start()] for path, m in named.items() if fusible_recipe(m) for dot in re.finditer(r"\.", path)
    }
    # Not the wrappers around a norm or a layer: FSDP's forward would gather weights, on one rank before another.
    layers = (m for path, m in named.items() if _of_rows(m) or (path in holders and m in repeated))
    layers = (m for m in layers if _inner(m) is m and not isinstance(m, nn.ModuleList))  # which has no forward
    sources = Sources()
    found = {m: _examine(m, sources, m in repeated, m not in in_rows) for m in layers}
    unrounded = any(not recipe.rounds_sum for recipe in map(fusible_recipe, named.values()) if recipe is not None)
    # Summands are found whatever is around a layer; a norm that is computed ahead may be another's there.
    inner = [(p, name, [_inner(m) if unrounded else m for m in row]) for p, name, row in rows]
    behind = _behind_each(inner, found, sources)
    told: dict[str, tuple[str, str]] = {}  # path -> (what is fused, why nothing is)
    for path, module in ((path, m) for path, m in named.items() if m in found):
        flow, fusion = found[module]
        reason = fusion if isinstance(fusion, str) else ""
        inside = [f"+ {reader}" for _, reader in flow.fusion.sites if reader]
        inside += [str(fusion)] if isinstance(fusion, (QKFusion, TurnFusion, ModulationFusion)) else []
        if inside or module in behind or (unrounded and flow.fusion.sites):
            try:
                undo.callback(fuse_again, model, module, getattr(type(module), "_hf_rmsnorm_fusion", None))
                fusion = replace(fusion, unrounded=unrounded) if isinstance(fusion, Fusion) else fusion
                fuse(module, fusion)  # one of an earlier patch, when other norms were swapped, goes
                if module in behind:
                    reader, owner, around = behind[module]
                    link(module, owner, reader, around)
                    inside.append("+ the norm behind it")
                elif unrounded and any(not name for _, name in flow.fusion.sites):
                    inside.append("+ what reads it")
            except Exception as error:  # a metaclass or __init_subclass__ of the user's may refuse in any way
                reason = str(error) if isinstance(error, CannotRewrite) else f"{type(error).__name__}: {error}"
        if inside and not reason:
            told[path] = ", ".join(inside), ""
        elif (module in in_rows and norms_of(module)) or isinstance(fusion, QKRefusal):
            told[path] = "", reason or UNREAD
    reasons = {path: ("", reason) for path, reason in _with_norms_further_in(model, in_rows, set(told)).items()}
    sums = [path for path, (fused, _) in told.items() if fused.startswith("+")]
    told = {
        path: words
        for path, words in {**reasons, **told}.items()
        if words[0] or not any(inner.startswith(f"{path}.") for inner in sums)
    }
    return tuple(FusedLayer(path, type(m).__name__, *told[path]) for path, m in named.items() if path in told)


def sums_unknown(layer: FusedLayer) -> bool:
    """Whether norms may read sums of this layer, or in it, of which nothing is known."""
    return layer.reason not in ("", UNREAD, NO_SUM) and not isinstance(layer.reason, QKRefusal)


def _with_norms_further_in(model: nn.Module, in_rows: set[nn.Module], told: set[str]) -> dict[str, str]:
    """Of the layers that hold patched norms, and nothing was told of: path -> why none of their sums is fused."""
    names = {path for path, module in model.named_modules() if module in in_rows}
    held: dict[str, list[str]] = {}
    for path in (path for path, module in model.named_modules() if fusible_recipe(module) is not None):
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


def _examine(module: nn.Module, sources: Sources, repeated: bool, inside: bool) -> tuple[LayerFlow, object]:
    """(what a module does with sums, what can be fused of it or why nothing can).

    repeated: there are more like it in the model; inside: it is further in than a layer, as attentions are.
    """
    flow = LayerFlow()
    part = layer_part(type(module))
    if part is not None and part._hf_rmsnorm_layer_base.forward is not part._hf_rmsnorm_original:
        return flow, "its class was given another forward: unpatch the model and patch it again"
    if other := replaced_forward(module):
        return flow, f"its forward was replaced on the instance by {other}"
    if shared := _shared_norms(module):
        reason = f"its {' and '.join(shared)} are one norm: sums and q/k norms are fused where each place has its own"
        return flow, QKRefusal(reason) if inside else reason
    if modulation := sources.modulation_of(module):
        return flow, modulation
    try:
        with neutral_modes(), torch.random.fork_rng(devices=[]):
            found = find_flow(module, inside) if repeated else flow
            flow = found if isinstance(found, LayerFlow) else flow
            if flow.fusion.sites:
                return flow, flow.fusion
            qk, why_not = sources.qk_of(module)
            if not why_not:
                return flow, qk
            if repeated and inside and len(norms_of(module)) > 1:
                return flow, QKRefusal(why_not)
            return flow, found if isinstance(found, str) else flow.reason
    except Exception as error:  # whatever a user's class does, its norms are swapped
        return flow, f"it could not be examined: {type(error).__name__}: {error}"


def _shared_norms(module: nn.Module) -> list[str]:
    """The names under which a module holds one patched norm more than once."""
    names: dict[nn.Module, list[str]] = {}
    for name, child in module._modules.items():
        if child is not None and fusible_recipe(child) is not None:
            names.setdefault(child, []).append(name)
    return next((shared for shared in names.values() if len(shared) > 1), [])


def _of_rows(module: nn.Module) -> set[str]:
    found = ((name, fusible_recipe(child)) for name, child in module.named_children())
    return {name for name, recipe in found if recipe is not None and recipe.is_of_rows}


def _find_qk(attention: nn.Module):
    """`find_qk` of the norms among its children that are short enough, for a head or for all of them.

    `F.rms_norm` and `F.layer_norm` stay where they are: what they return is contiguous, and put off to behind a
    transpose it would lie otherwise in memory. So do norms with a bias, whose sum no kernel rounds before a rotation.
    """
    found = {
        name: recipe_of(norm).spec
        for name, norm in norms_of(attention).items()
        if all(p.shape[-1] <= (MAX_TOKEN if p.dim() == 1 else MAX_HEAD_DIM) for p in norm.parameters(recurse=False))
    }
    alone = {name for name, spec in found.items() if spec.functional or spec.has_bias}
    return find_qk(unfused(type(attention)), set(found), attention._modules, alone)


def _behind_each(
    rows: list, found: dict[nn.Module, tuple], sources: Sources
) -> dict[nn.Module, tuple[str, nn.Module, tuple]]:
    """Layer -> (name of the norm that reads a sum that it returns, whose child that is, what is around the layer).

    A module without norms that returns such a sum is examined for it, and is in `found` then.
    """
    behind: dict[nn.Module, tuple[str, nn.Module, tuple]] = {}

    def first_norm(module: nn.Module) -> tuple[str, nn.Module] | None:
        """The norm that is the first to be given what a module is given, and whose child it is."""
        while module in found and (name := found[module][0].entry):
            if name in norms_of(module):
                return name, module
            module = module._modules[name]
        return None

    def spread(module: nn.Module, reader: tuple[str, nn.Module] | None, around: tuple) -> None:
        """Note who reads what a module returns, with all in it that return the same."""
        if reader is None:
            return
        flow, _ = found[module] if module in found else found.setdefault(module, _examine(module, sources, True, False))
        if any(not name for _, name in flow.fusion.sites):
            behind.setdefault(module, (*reader, around))
        for child, to in flow.passes:
            if not to:
                spread(module._modules[child], reader, (*around, module))

    for parent, name, row in rows:
        for here, there in zip(row, [*row[1:], None], strict=False):  # a row may be empty
            last = _called_last(parent, name) if there is None else ""
            if here in found:
                spread(here, (last, parent) if last else there and first_norm(there), ())
    for module, (flow, _) in list(found.items()):
        for child, to in flow.passes:
            if to:
                reader = (to, module) if to in norms_of(module) else first_norm(module._modules[to])
                spread(module._modules[child], reader, ())
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
