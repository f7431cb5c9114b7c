"""What a patch did: one record per module path, printed as a compact table."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..formula import NormSpec
from ..paths import compact_paths


@dataclass(frozen=True)
class Swapped:
    """A module that runs the fused forward.

    Attributes:
        path, class_name: where it is, and its class's name.
        formula: what it was recognised to compute.
        notes: which calls still run the module's own forward, and an unusual layout; "" where there is nothing to say.
        converted: the formula is an RMSNorm that a converted checkpoint records where the module is a LayerNorm.
    """

    path: str
    class_name: str
    formula: NormSpec
    notes: str = ""
    converted: bool = False

    @property
    def text(self) -> str:
        """The formula and the notes, in words."""
        return f"{self.formula}; {self.notes}" if self.notes else str(self.formula)


@dataclass(frozen=True)
class Skipped:
    """A norm, or what its name calls one, that was left alone: why, and what to do about it."""

    path: str
    class_name: str
    reason: str
    cure: str = ""


@dataclass(frozen=True)
class FusedLayer:
    """A layer whose norms are computed with what surrounds them, or why it is not such a one.

    Attributes:
        path, class_name: where it is, and its class's name.
        fused: ``"+ post_attention_layernorm, + the norm behind it"``; "" where nothing is.
        reason: why nothing is; its norms are swapped all the same.
    """

    path: str
    class_name: str
    fused: str
    reason: str = ""


@dataclass(frozen=True)
class PatchReport:
    """Every norm of a model after `patch_model`, in the order of ``model.named_modules()``.

    Attributes:
        swapped: the modules that run the fused forward, those patched earlier included. A module that the model holds
            at several paths has a record for each.
        skipped: norms left alone, and modules that only carry a norm's name.
        layers: decoder layers, fused or not.
    """

    swapped: tuple[Swapped, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    layers: tuple[FusedLayer, ...] = ()

    def to_dict(self) -> dict:
        """Plain lists and dicts for JSON: ``{"swapped": [...], "skipped": [...], "layers": [...]}``."""
        return {
            "swapped": [
                {
                    "path": r.path,
                    "class_name": r.class_name,
                    "formula": {**r.formula.to_dict(), "text": str(r.formula)},
                    "notes": r.notes,
                    "converted": r.converted,
                }
                for r in self.swapped
            ],
            "skipped": [asdict(record) for record in self.skipped],
            "layers": [asdict(record) for record in self.layers],
        }

    def groups(self) -> list[tuple[str, str, str, list[str]]]:
        """(``"swapped"`` or ``"skipped"``, class names, formula or reason, paths), modules alike in one group.

        Swapped modules are alike if they compute the same formula, skipped ones if class and reason are the same.
        """
        swapped: dict[str, list[Swapped]] = {}
        for record in self.swapped:
            swapped.setdefault(record.text, []).append(record)
        skipped: dict[tuple[str, str], list[str]] = {}
        for record in self.skipped:
            skipped.setdefault((record.class_name, record.reason), []).append(record.path)
        return [
            ("swapped", ", ".join(dict.fromkeys(r.class_name for r in records)), text, [r.path for r in records])
            for text, records in swapped.items()
        ] + [("skipped", *key, paths) for key, paths in skipped.items()]

    def __str__(self) -> str:
        norms = "norm" if len(self.swapped) == 1 else "norms"
        lines = [f"{len(self.swapped)} {norms} swapped, {len(self.skipped)} left alone"]
        cures = {(r.class_name, r.reason): r.cure for r in self.skipped}
        for verdict, class_names, what, paths in self.groups():
            lines.append(f"  {verdict} {len(paths):>4} x {class_names}: {what}")
            if verdict == "skipped" and cures[class_names, what]:
                lines.append(f"      what to do: {cures[class_names, what]}")
            lines += [f"      {path}" for path in compact_paths(paths)]
        layers: dict[tuple[str, str], list[str]] = {}
        for record in self.layers:
            said = f"fused: {record.fused}" if record.fused else f"not fused: {record.reason}"
            layers.setdefault((record.class_name, said), []).append(record.path)
        for (class_name, said), paths in layers.items():
            lines.append(f"  layers  {len(paths):>4} x {class_name}: {said}")
            lines += [f"      {path}" for path in compact_paths(paths)]
        if any(record.fused for record in self.layers):
            lines.append("  fused in   float32, float16, bfloat16, and mixtures of them, as under autocast")
        return "\n".join(lines)
