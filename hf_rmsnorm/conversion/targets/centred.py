"""The interface of planned conversions, and the one that keeps the checkpoint's
architecture.

There, all that writes to the residual stream is centred, so that LayerNorm is RMSNorm.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from ...paths import compact_paths
from ...record import RECORD_KEY
from ..checkpoint.layout import Layout, as_source
from ..checkpoint.source import Checkpoint
from ..plan import CentringPlan, ConversionRefused
from ..planned import changed_config, planned_tensors
from ..proxy.discover import discover
from ..proxy.model import ProxyModel
from ..proxy.prove import ProofReport, prove
from ..proxy.run import alike
from ..tensors import Lazy
from ..verify.folder import Verification, add_to_card, provenance, verify_folder
from ..verify.pair import Running

CARD_HEADING = "## Converted from LayerNorm to RMSNorm"
PLAN = "conversion_plan.json"
SHOWN = 6  # lines of a list, so that the plan of a large model fits on a screen


@dataclass(frozen=True)
class PlannedConversion(ABC):
    """A conversion that is planned and proven; nothing is written yet.

    Args:
        made: what `provenance` says of its source.
    """

    made: dict[str, str]
    keeps_shards: ClassVar[bool] = False  # whether the result's shards are the source's
    missing = ()  # parameters of the model that the checkpoint lacks

    @abstractmethod
    def to_dict(self) -> dict:
        """Plain values for JSON."""

    @abstractmethod
    def result(self, source: Checkpoint) -> tuple[Layout, str]:
        """The tensors and the text of config.json that are made of an open checkpoint."""

    @abstractmethod
    def verify(self, src: str | Path, folder: Path, how: Running) -> Verification:
        """The verdict on a folder that was written."""

    @abstractmethod
    def describe(self, folder: Path, verdict: Verification) -> None:
        """Add a section to the model card of a folder that passed, and the plan."""


@dataclass(frozen=True)
class PlannedSteps(PlannedConversion):
    """Steps on tensors of the source, whose shards keep their names and their order."""

    keeps_shards = True

    centring: CentringPlan

    def to_dict(self) -> dict:
        return {"plan": json.loads(self.centring.to_json())}

    def tensors(self, source: Checkpoint) -> dict[str, Lazy]:
        """Every tensor of the result."""
        return planned_tensors(self.centring, source, source.folder)

    def metadata(self) -> dict[str, str]:
        """For ``__metadata__`` of the shards."""
        return {RECORD_KEY: json.dumps(self.made, sort_keys=True)}

    def result(self, source):
        config = changed_config(source.config, self.centring.config)
        return as_source(self.tensors(source), source, self.metadata()), config


@dataclass(frozen=True)
class PlannedCentring(PlannedSteps):
    """A plan, and its proof in float64 on a small random model of the same classes."""

    proof: ProofReport
    missing: tuple[str, ...] = ()

    def to_dict(self) -> dict:
        return {**super().to_dict(), "proof": self.proof.to_dict()}

    def __str__(self) -> str:
        plan = self.centring
        steps = [
            f"  {scale.key} takes in the layer scale {scale.by}, which becomes ones"
            for scale in plan.scale
        ]
        steps += [
            f"new tensor {copy.key}, a copy of {copy.source} as it is"
            for copy in plan.copy
        ]
        becoming = [norm.path for norm in plan.norms if norm.becomes_rms]
        lines = [
            str(self.proof),
            f"tensors changed ({len(plan.centre)}):",
            *_grouped(_changed(plan)),
            *_few(steps),
        ]
        lines += _grouped({f"norms that become RMSNorm ({len(becoming)}):": becoming})
        lines += _grouped(_staying(plan))
        if plan.undetermined:
            lines += _grouped(
                {
                    "tensors that nothing depends on, copied as they are:": [
                        *plan.undetermined
                    ]
                }
            )
        return "\n".join([*lines, *plan.notes])

    def verify(self, src, folder, how):
        return verify_folder(src, folder, how)

    def describe(self, folder: Path, verdict: Verification) -> None:
        plan = self.centring
        (folder / PLAN).write_text(plan.to_json() + "\n", encoding="utf-8")
        becoming = sum(norm.becomes_rms for norm in plan.norms)
        text = f"""Each weight that writes to the residual stream had its mean subtracted. So LayerNorm and RMSNorm give
the same result, and {becoming} of {len(plan.norms)} norms may run as RMSNorm. The checkpoint loads like any other of
its architecture and gives the original's logits. `hf_rmsnorm.patch_model(model)` runs its norms as RMSNorm.
`{PLAN}` lists the changed tensors."""
        add_to_card(folder, CARD_HEADING, text, self.made, self.proof, verdict)


def _changed(plan: CentringPlan) -> dict[str, list[str]]:
    """A description of each kind of step -> its tensors."""
    groups: dict[str, list[str]] = {}
    for step in plan.centre:
        rows = "each row" if step.axis else "each column or vector"
        blocks = (
            ""
            if step.blocks is None
            else f" (some of the rows: {_listed(step.blocks)})"
        )
        groups.setdefault(
            f"  {rows} of {step.block} has its mean subtracted{blocks}:", []
        ).append(step.key)
    return groups


def _listed(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN]))
    return (
        shown if len(numbers) <= SHOWN else f"{shown} and {len(numbers) - SHOWN} more"
    )


def _staying(plan: CentringPlan) -> dict[str, list[str]]:
    """Why norms stay LayerNorm -> their paths; reasons that differ in numbers alone are one."""
    groups: dict[str, tuple[str, list[str]]] = {}
    for norm in plan.norms:
        if not norm.becomes_rms:
            reason, paths = groups.setdefault(alike(norm.reason), (norm.reason, []))
            paths.append(norm.path)
    return {
        f"norms that stay LayerNorm ({len(paths)}): {reason}": paths
        for reason, paths in groups.values()
    }


def _grouped(groups: dict[str, list[str]]) -> list[str]:
    """A line for each head and its paths, as many as fit on a screen."""
    lines = [
        [head, *_few([f"    {path}" for path in compact_paths(paths)])]
        for head, paths in groups.items()
    ]
    shown = [line for group in lines[:SHOWN] for line in group]
    return (
        [*shown, f"  and {len(lines) - SHOWN} more kinds (--json lists all)"]
        if len(lines) > SHOWN
        else shown
    )


def _few(lines: list[str]) -> list[str]:
    if len(lines) <= SHOWN:
        return lines
    return [*lines[:SHOWN], f"    and {len(lines) - SHOWN} more (--json lists all)"]


def plan_centring(src, proxy: ProxyModel) -> PlannedCentring:
    """The plan for the checkpoint in a folder, proven on its proxy; refused if it is
    not exact.
    """
    plan = discover(proxy)
    proof = prove(plan, proxy)
    if not proof.passed:
        raise ConversionRefused(
            f"{proof}: this model is not converted, as its plan is not exact"
        )
    made = provenance(src)
    record = _as_before(
        {**plan.config[RECORD_KEY], **made, "proof": proof.to_dict()}, proxy
    )
    return PlannedCentring(
        made, replace(plan, config={**plan.config, RECORD_KEY: record}), proof
    )


def _as_before(record: dict, proxy: ProxyModel) -> dict:
    """The record that the source has from an earlier conversion, if it equals this one."""
    before = getattr(proxy.config, RECORD_KEY, None)
    if before is None:
        return record
    keys = "version", "residual_weights", "rms_norms"
    same = all(before.get(key) == record.get(key) for key in keys)
    return before if same else record
