"""The report of a patch: a record for each module path, printed as a short table."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch.nn import Module

from ..formula import NormSpec
from ..fused.hooks import why_called
from ..fused.recipe import Asked, Recipe
from ..ops.backend import runs_on, where_norms_run
from ..ops.settings import settings
from ..paths import compact_paths, fitted
from .plan import Entry

WHILE_COMPILING = {
    "original": "torch.compile traces the model's own code, as without the patch",
    "operator": "torch.compile traces one operator for each norm",
}


@dataclass(frozen=True)
class Swapped:
    """A module that runs the fused forward.

    Attributes:
        formula: the formula that was recognised.
        notes: which calls still run the module's own forward, and an unusual layout; ""
            if there are none.
        converted: a converted checkpoint says that this LayerNorm computes RMSNorm.
    """

    path: str
    class_name: str
    formula: NormSpec
    notes: str = ""
    converted: bool = False

    @property
    def text(self) -> str:
        """The formula and the notes, in words."""
        return "; ".join(filter(None, (str(self.formula), self.notes)))


@dataclass(frozen=True)
class Skipped:
    """A norm, or a module with a norm's name, that was not swapped: why, and what to do
    about it.
    """

    path: str
    class_name: str
    reason: str
    cure: str = ""


@dataclass(frozen=True)
class FusedLayer:
    """A layer whose norms are fused with the code around them, or the reason why they
    are not.

    Attributes:
        fused: ``"+ post_attention_layernorm"`` for a residual add with that norm; ""
            where nothing is.
        reason: why nothing is; its norms are swapped all the same.
    """

    path: str
    class_name: str
    fused: str
    reason: str = ""

    @property
    def text(self) -> str:
        """The fused pieces, with the residual adds named; or the reason."""
        return re.sub(r"(^|, )\+ ", r"\1residual add + ", self.fused) or self.reason


@dataclass(frozen=True)
class PatchReport:
    """Every norm of a model after `patch_model`, in the order of
    ``model.named_modules()``.

    Attributes:
        swapped: the modules that run the fused forward, whether this call swapped them
            or an earlier one. A module at several paths has a record for each.
        skipped: norms that were not swapped, and modules that only carry a norm's name.
        layers: decoder layers, fused or not.
        devices: for each device of the model its name, the backend that runs there, and
            why.
    """

    swapped: tuple[Swapped, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    layers: tuple[FusedLayer, ...] = ()
    devices: tuple[dict, ...] = ()

    def to_dict(self) -> dict:
        """Plain lists and dicts for JSON: ``"swapped"``, ``"skipped"``, ``"layers"``
        and ``"devices"``.
        """
        data = {kind: list(records) for kind, records in asdict(self).items()}
        for at, record in enumerate(self.swapped):
            formula = record.formula.to_dict()
            formula["text"] = str(record.formula)
            data["swapped"][at]["formula"] = formula
        return data

    def to_text(self) -> str:
        """The report as it is printed."""
        lines = [self.counts]
        for (text,), records in alike(self.swapped, "text"):
            names = dict.fromkeys(record.class_name for record in records)
            lines += group_lines("swapped", ", ".join(names), text, records)
        groups = alike(self.skipped, "class_name", "reason", "cure")
        for (name, reason, cure), records in groups:
            lines += group_lines("skipped", name, reason, records)
            if cure:
                lines.append(f"      what to do: {cure}")
        groups = alike(self.layers, "class_name", "fused", "text")
        for (name, fused, text), records in groups:
            kind = "fused" if fused else "not fused"
            lines += group_lines(kind, name, text, records)
        lines += [f"  runs on   {place}" for place in self.places]
        if any(record["backend"] == "triton" for record in self._now()):
            lines.append(f"  compiled  {WHILE_COMPILING[settings.while_compiling]}")
        return fitted("\n".join(lines), 10)

    @property
    def counts(self) -> str:
        """How many norms were swapped, and how many not."""
        count = len(self.swapped)
        norms = "norm" if count == 1 else "norms"
        return f"{count} {norms} swapped, {len(self.skipped)} skipped"

    @property
    def places(self) -> list[str]:
        """Where the norms run: a sentence for all devices where the same computes them."""
        records = self._now()
        places = where_norms_run(records)
        backends = [(record["device"], record["backend"]) for record in records]
        if backends == [("cpu", "original")]:
            places[-1] += "; on an NVIDIA GPU the norms run fused"
        return places

    @property
    def in_one_line(self) -> str:
        """The counts, and where the norms run."""
        return "; ".join([self.counts, *[f"runs on {place}" for place in self.places]])

    def _now(self) -> list[dict]:
        """The records of the devices as they are now: one may have been left since."""
        return [runs_on(record["device"]) for record in self.devices]

    def __str__(self) -> str:
        return self.to_text()


def report_on(
    model: Module, entries: list[Entry], layers: tuple[FusedLayer, ...]
) -> PatchReport:
    """The report of a model that was patched by this plan."""
    swapped = []
    skipped = []
    for entry in entries:
        name = entry.class_name
        for path in entry.paths:
            if entry.proven is None:
                skipped.append(Skipped(path, name, *entry.refusal))
                continue
            notes = _notes(entry)
            as_rms = entry.asked.as_rms
            swapped.append(Swapped(path, name, entry.formula, notes, as_rms))
    devices = []
    if swapped:
        devices = [runs_on(device) for device in _devices(model)]
    return PatchReport(tuple(swapped), tuple(skipped), layers, tuple(devices))


def calls_not_fused(recipe: Recipe) -> str:
    """The calls of a norm that run its own forward, in words; "" if there are none."""
    notes = []
    if recipe.only_float32:
        notes.append("in float32 only: in half precision it runs its own forward")
    if recipe.asks_autocast:
        notes.append("under autocast it runs its own forward")
    return "; ".join(notes)


def saved_for_backward(asked: Asked) -> str:
    """The tensor that a norm saves for its backward, in words; "" for its input, unless
    `memory_efficient` asks for another.
    """
    if asked.keeps_output:
        return "keeps its output for backward, but not where one launch rotates or modulates it"
    if asked.memory_efficient:
        return f"keeps its input for backward: {asked.input_needed}"
    return ""


def _notes(entry: Entry) -> str:
    notes = [calls_not_fused(entry.recipe)]
    if entry.asked.as_rms:
        notes.append("as the converted checkpoint says")
    notes.append(saved_for_backward(entry.asked))
    why = why_called(entry.module)
    if why and entry.asked.fuse_residual:
        notes.append(f"computed by itself: {why}")
    if len(entry.paths) > 1:
        notes.append(f"one module at {len(entry.paths)} paths")
    notes.append(entry.note)
    return "; ".join(filter(None, notes))


def _devices(model: Module) -> list[torch.device]:
    """The devices that hold the model, or run its offloaded modules; never meta."""
    devices = []
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        execution_device = getattr(hook, "execution_device", None)
        for parameter in module.parameters(recurse=False):
            if not parameter.is_meta:
                devices.append(parameter.device)
            elif execution_device is not None:
                devices.append(torch.device(execution_device))
    return list(dict.fromkeys(devices))


def group_lines(kind: str, name: str, text: str, records: list) -> list[str]:
    """The lines of one group: a heading, then its paths."""
    paths = compact_paths([record.path for record in records])
    heading = f"  {kind:<9} {len(records)} x {name}: {text}"
    return [heading, *[f"      {path}" for path in paths]]


def alike(records: Iterable, *names: str) -> Iterable[tuple[tuple, list]]:
    """The values of these attributes, and the records that have them."""
    groups: dict[tuple, list] = {}
    for record in records:
        key = tuple(getattr(record, name) for name in names)
        groups.setdefault(key, []).append(record)
    return groups.items()
