"""What a patch did: one record per module path, printed as a compact table."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from ..formula import NormSpec
from ..paths import compact_paths, fitted


@dataclass(frozen=True)
class Swapped:
    """A module that runs the fused forward.

    Attributes:
        formula: what it was recognised to compute.
        notes: which calls still run the module's own forward, and an unusual layout; "" where there is nothing to say.
        converted: the formula is an RMSNorm that a converted checkpoint records where the module is a LayerNorm.
        numerics: in whose order of rounding it is computed, as `patch_model` was asked.
    """

    path: str
    class_name: str
    formula: NormSpec
    notes: str = ""
    converted: bool = False
    numerics: str = "model"

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
    """A layer whose norms are fused with the code around them, or the reason why they are not.

    Attributes:
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
        devices: of each that holds the model, or runs what accelerate has offloaded, its name, the backend there and
            the reason (`runs_on`).
    """

    swapped: tuple[Swapped, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    layers: tuple[FusedLayer, ...] = ()
    devices: tuple[dict, ...] = ()

    def to_dict(self) -> dict:
        """Plain lists and dicts for JSON: ``"swapped"``, ``"skipped"``, ``"layers"`` and ``"devices"``."""
        found = {kind: list(records) for kind, records in asdict(self).items()}
        for record, own in zip(found["swapped"], self.swapped, strict=True):
            record["formula"] = {**own.formula.to_dict(), "text": str(own.formula)}
        return found

    def groups(self) -> list[tuple[str, str, str, list[str]]]:
        """(``"swapped"`` or ``"skipped"``, class names, formula or reason, paths), modules alike in one group.

        Swapped modules share a group if they compute the same formula, skipped ones if class and reason are equal.
        """
        swapped = _alike(self.swapped, lambda record: record.text)
        skipped = _alike(self.skipped, lambda record: (record.class_name, record.reason))
        return [
            ("swapped", ", ".join(dict.fromkeys(r.class_name for r in records)), text, [r.path for r in records])
            for text, records in swapped.items()
        ] + [("skipped", *key, [r.path for r in records]) for key, records in skipped.items()]

    def rows(self) -> list[tuple[str, str, str]]:
        """(kind of entry, modules, what was done to them or the reason why not), a row for each entry."""
        norms = "norm" if len(self.swapped) == 1 else "norms"
        rows = [("", f"{len(self.swapped)} {norms} swapped, {len(self.skipped)} left alone", "")]
        cures = {(r.class_name, r.reason): f"\n      what to do: {r.cure}" for r in self.skipped if r.cure}
        for what, names, text, paths in self.groups():
            cure = cures.get((names, text), "") if what == "skipped" else ""
            rows.append((what, _modules(names, paths), text + cure))
        alike = _alike(self.layers, lambda record: (record.class_name, record.fused, record.reason))
        for (name, fused, reason), records in alike.items():
            text = f"fused: {fused}" if fused else f"not fused: {reason}"
            rows.append(("layers", _modules(name, [record.path for record in records]), text))
        if any(record.fused for record in self.layers):
            rows.append(("fused in", "", "float32, float16, bfloat16, and mixtures of them, as under autocast"))
        return [*rows, *self._device_rows()]

    def _device_rows(self) -> list[tuple[str, str, str]]:
        until = ", and nothing is fused, until the model is moved to a GPU that Triton serves"
        if any(record.converted or record.numerics != "model" for record in self.swapped):
            until = " (other formulas than their own in plain torch)" + until
        rows = []
        for (backend, reason), records in _alike(self.devices, lambda r: (r["backend"], r["reason"])).items():
            names = ", ".join(record["device"] for record in records)
            rows.append(("runs on", "", f"{names}: {reason}{until if backend == 'original' else ''}"))
        return rows

    def __str__(self) -> str:
        head, *rows = self.rows()
        lines = [head[1]]
        for what, modules, said in rows:
            name, *paths = modules.split("\n")
            name = name.rjust(len(name) + 4 - name.find(" "))  # the counts below each other
            lines.append(f"  {what:<7} {name}: {said}" if modules else f"  {what:<10} {said}")
            lines += [f"      {path}" for path in paths]
        return fitted("\n".join(lines), 11)


def _modules(class_names: str, paths: list[str]) -> str:
    return "\n".join([f"{len(paths)} x {class_names}", *compact_paths(paths)])


def _alike(records: tuple, key: Callable) -> dict:
    """The records by a key of theirs, in their order."""
    found: dict = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found
