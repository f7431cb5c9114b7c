"""The conversion that keeps the checkpoint's architecture: all that writes to the
residual stream is centred, so that LayerNorm is RMSNorm.

`plan_centring` is what `plan_conversion` calls: `proxy/discover.py` finds the plan,
`proxy/prove.py` proves it, and `proxy/keys.py` puts it into the checkpoint's own keys.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...converted.record import RECORD_KEY
from ...paths import compact_paths
from ..card import add_to_card, provenance
from ..checkpoint.source import Checkpoint
from ..errors import ConversionRefused
from ..plan import Centre, CentringPlan
from ..proxy.discover import discover
from ..proxy.keys import in_checkpoint
from ..proxy.model import ProxyModel
from ..proxy.prove import ProofReport, prove
from ..proxy.run import alike
from ..tensors import planned_tensors
from ..verify.compare import Verification
from .planned import PlannedConversion

CARD_HEADING = "## Converted from LayerNorm to RMSNorm"
PLAN = "conversion_plan.json"
SHOWN = 6  # lines of a list, so that the plan of a large model fits on a screen


def plan_centring(
    source: Checkpoint,
    proxy: ProxyModel,
    missing: list[str] | None,
    notes: Iterable[str],
) -> PlannedCentring:
    """The plan for a checkpoint, proven on its proxy; refused if it is not exact.

    Args:
        missing: parameters of the model that the checkpoint lacks; None where its
            weights are not there, as where a hub's model is only planned.
        notes: what the plan says besides.
    """
    plan = discover(proxy)
    proof = prove(plan, proxy)
    if not proof.passed:
        raise ConversionRefused(
            f"{proof}: this model is not converted, as its plan is not exact"
        )
    plan = in_checkpoint(plan, source.tensors, proxy)
    origin = provenance(source.folder)
    record = {**plan.config[RECORD_KEY], **origin, "proof": proof.to_dict()}
    said = [*plan.notes, *notes]
    # one of an earlier conversion is kept where it says the same
    if before := getattr(proxy.config, RECORD_KEY, None):
        said.append("It was converted before: weights that have no mean stay.")
        keys = "version", "residual_weights", "rms_norms"
        if all(before.get(key) == record[key] for key in keys):
            record = before
    config = {**plan.config, RECORD_KEY: record}
    plan = replace(plan, config=config, notes=tuple(said))
    return PlannedCentring(origin, plan, proof, missing)


@dataclass(frozen=True)
class PlannedCentring(PlannedConversion):
    """A plan, and its proof in float64 on a small random model of the same classes."""

    centring: CentringPlan
    proof: ProofReport
    missing: list[str] | None

    def to_dict(self) -> dict:
        return {"plan": asdict(self.centring), "proof": self.proof.to_dict()}

    def __str__(self) -> str:
        plan = self.centring
        pairs = [(_words(step), step.key) for step in plan.centre]
        for norm in plan.norms:
            head = "norms that become RMSNorm"
            if not norm.becomes_rms:
                head = f"norms that stay LayerNorm, as {alike(norm.reason)}"
            pairs.append((head, norm.path))
        copied = "tensors that nothing depends on, copied as they are"
        pairs += [(copied, key) for key in plan.undetermined]
        copies = [
            f"new tensor {copy.key}, a copy of {copy.source} as it is"
            for copy in plan.copy
        ]
        return "\n".join([str(self.proof), *_grouped(pairs), *copies, *plan.notes])

    def config(self, source):
        config = {**source.config, **self.centring.config}
        return json.dumps(config, indent=2) + "\n"

    def tensors(self, source):
        return planned_tensors(self.centring, source)

    def describe(self, folder: Path, verification: Verification) -> None:
        plan = self.centring
        steps = json.dumps(asdict(plan), indent=1, sort_keys=True)
        (folder / PLAN).write_text(f"{steps}\n", encoding="utf-8")
        becoming = sum(norm.becomes_rms for norm in plan.norms)
        text = f"""Each weight that writes to the residual stream had its mean subtracted. So LayerNorm and RMSNorm give
the same result, and {becoming} of {len(plan.norms)} norms may run as RMSNorm. The checkpoint loads like any other of
its architecture and gives the original's logits. `hf_rmsnorm.patch_model(model)` runs its norms as RMSNorm.
`{PLAN}` lists the changed tensors."""
        proofs = self.proof, verification
        add_to_card(folder, CARD_HEADING, text, self.provenance, *proofs)


def _words(step: Centre) -> str:
    rows = "each row" if step.axis else "each column or vector"
    some = "" if step.blocks is None else ", in some blocks,"
    return f"tensors changed: {rows} of {step.block}{some} has its mean subtracted"


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each head and the paths under it, as many as fit on a screen."""
    groups = defaultdict(list)
    for head, path in pairs:
        groups[head].append(path)
    lines = []
    for head, paths in groups.items():
        shown = compact_paths(paths)
        lines.append(f"{head} ({len(paths)}):")
        lines += [f"  {path}" for path in shown[:SHOWN]]
        if len(shown) > SHOWN:
            lines.append(f"  and {len(shown) - SHOWN} more (--json lists all)")
    return lines
