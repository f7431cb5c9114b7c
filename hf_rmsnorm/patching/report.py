"""The report of a patch: a record for each module path, printed as a short table."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ..formula import NormSpec
from ..ops.backend import where_norms_run
from ..ops.settings import settings
from ..paths import compact_paths, fitted

MOST_PATHS = 8  # of one group that are printed


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
        numerics: the order of rounding, as `patch_model` was asked.
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
        """The fused pieces, or the reason, in words."""
        return in_words(self.fused) if self.fused else self.reason


@dataclass(frozen=True)
class PatchReport:
    """Every norm of a model after `patch_model`, in the order of
    ``model.named_modules()``.

    Attributes:
        swapped: the modules that run the fused forward, those patched earlier included.
            A module that the model holds at several paths has a record for each.
        skipped: norms that were not swapped, and modules that only carry a norm's name.
        layers: decoder layers, fused or not.
        devices: for each device that runs the model, its name, the backend there and
            the reason.
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
        for plain, record in zip(data["swapped"], self.swapped, strict=True):
            plain["formula"] = {**record.formula.to_dict(), "text": str(record.formula)}
        return data

    def groups(self) -> list[tuple[str, str, str, list[str]]]:
        """(``"swapped"`` or ``"skipped"``, class names, formula or reason, paths) for
        each group.

        Swapped modules share a group if they compute the same formula, skipped ones if
        class and reason are equal.
        """
        swapped = _alike(self.swapped, lambda record: record.text)
        skipped = _alike(
            self.skipped, lambda record: (record.class_name, record.reason)
        )
        groups = []
        for text, records in swapped.items():
            names = ", ".join(dict.fromkeys(record.class_name for record in records))
            groups.append(("swapped", names, text, [record.path for record in records]))
        for (name, reason), records in skipped.items():
            groups.append(
                ("skipped", name, reason, [record.path for record in records])
            )
        return groups

    def to_text(self, verbose: bool = False) -> str:
        """The report as it is printed; verbose: with every path of a long list."""
        count = len(self.swapped)
        lines = [
            f"{count} {'norm' if count == 1 else 'norms'} swapped, {len(self.skipped)} skipped"
        ]
        cures = {
            (record.class_name, record.reason): record.cure for record in self.skipped
        }
        for kind, names, text, paths in self.groups():
            cure = cures.get((names, text)) if kind == "skipped" else ""
            lines += _entry(kind, names, text, paths, verbose)
            lines += [f"      what to do: {cure}"] if cure else []
        alike = _alike(
            self.layers,
            lambda record: (bool(record.fused), record.class_name, record.text),
        )
        for (fused, name, text), records in alike.items():
            paths = [record.path for record in records]
            lines += _entry(
                "fused" if fused else "not fused", name, text, paths, verbose
            )
        lines += [f"  {'runs on':<9} {text}" for text in self._runs_on()]
        if any(record["backend"] == "triton" for record in self.devices):
            lines.append(
                f"  {'compiled':<9} {WHILE_COMPILING[settings.while_compiling]}"
            )
        return fitted("\n".join(lines), 10)

    def _runs_on(self) -> list[str]:
        sentences = where_norms_run(self.devices)
        if sentences and all(
            record["device"] == "cpu" and record["backend"] == "original"
            for record in self.devices
        ):
            sentences[-1] += "; on an NVIDIA GPU the norms run fused"
        return sentences

    def __str__(self) -> str:
        return self.to_text()


def in_words(fused: str) -> str:
    """The fused pieces of a layer, with the residual adds named."""
    return re.sub(r"(^|, )\+ ", r"\1residual add + ", fused)


def _entry(
    kind: str, names: str, text: str, paths: list[str], verbose: bool
) -> list[str]:
    """The lines of one group: a heading, then its paths."""
    shown = compact_paths(paths)
    more = 0 if verbose else max(0, len(shown) - MOST_PATHS)
    lines = [f"  {kind:<9} {len(paths)} x {names}: {text}"]
    lines += [f"      {path}" for path in shown[: len(shown) - more]]
    return [*lines, f"      and {more} more"] if more else lines


def _alike(records: tuple, key: Callable) -> dict:
    """The records with the same key, by that key, in their order."""
    groups: dict = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups
