"""Tables of Markdown from the result of `python -m benchmarks layer`: `TABLES` has
those of the documentation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.speed import UNPATCHED, speed_range, speed_words, times_as_fast
from benchmarks.tables import markdown

RESULTS = Path(__file__).resolve().parents[1] / "scripts/results"
GPU = "nvidia-h100-80gb-hbm3-2026-11-25.json"  # the newest with Liger
VARIANTS = {
    "eager": "Hugging Face",
    "liger": "Liger",
    "hf_rmsnorm": "hf-rmsnorm",
    "hf_rmsnorm_memory_efficient": "hf-rmsnorm with memory_efficient",
    "hf_rmsnorm_liger": "hf-rmsnorm with Liger's MLP and loss",
    "hf_rmsnorm_memory_efficient_liger": "memory_efficient with Liger's MLP and loss",
}
COUNTED = ("kernels, decoding", "kernels, prefill")
COUNTED += ("moved per token", "kept per token", "equal bits")
SPEEDS = {"prefill": "speed, prefill", "train": "speed, training"}
SPEEDS |= {"decode": "speed, decoding"}
# of a result of `python -m benchmarks gpu`
SECTIONS = {"Llama-3.1-8B": "llama", "Qwen3-8B": "qwen3"}
IN_A_GPU_RESULT = {"eager": UNPATCHED, "liger": "liger", "hf_rmsnorm": "patch_model"}
IN_A_GPU_RESULT |= {"hf_rmsnorm_liger": "patch_model_liger"}
NORMS_ALONE = "norms swapped"  # of Liger, in the results of 2026-11
NOTE = (
    "Moved: bytes that norms, residual sums and the rotary embedding read and write. "
    "Kept: activations that training keeps. Liger fuses the MLP too."
)


def committed() -> dict:
    """The committed result."""
    return json.loads((RESULTS / "layer.json").read_text(encoding="utf-8"))


def models_table(data: dict) -> list[str]:
    """The lines of a table with a row for each model and variant, and of a note."""
    speeds = gpu_speeds()
    rows = []
    for name, counted in data["models"].items():
        for variant, words in VARIANTS.items():
            if variant in counted:
                cells = [*_counted(counted[variant]), *_ranges(speeds, name, variant)]
                rows.append([f"{name}, {words}", *cells])
    header = ["one decoder layer, bf16", *COUNTED, *SPEEDS.values()]
    return [*markdown(header, rows), "", f"{NOTE} {_speed_note(speeds)}"]


def row_table(data: dict) -> list[str]:
    """The lines of a table with what a norm's kernels take for one row on an H100."""
    row = data["row"]
    columns = list(product(("forward", "backward"), ("instructions", "sectors")))
    header = [f"RMSNorm, a row of {row['hidden_size']}, bf16"]
    header += [f"{way}: {unit}" for way, unit in columns]
    rows = []
    for variant, words in VARIANTS.items():
        if variant in row["forward"]:
            cells = [f"{row[way][variant][unit]:.0f}" for way, unit in columns]
            rows.append([words, *cells])
    return markdown(header, rows)


@dataclass(frozen=True)
class Speed:
    """A variant of a model in one result of a GPU.

    Attributes:
        device: such as H100.
        liger: what the result says that it measured of Liger.
        phases: by phase the entries of the variant and of the unpatched model.
    """

    model: str
    variant: str
    device: str
    liger: str
    phases: dict[str, tuple[dict, dict]]

    @property
    def of_its_norms_alone(self) -> bool:
        return self.variant == "liger" and self.liger == NORMS_ALONE

    @property
    def words(self) -> str:
        """The variant, as a reader knows it."""
        return (
            "Liger's norms alone" if self.of_its_norms_alone else VARIANTS[self.variant]
        )


def gpu_results() -> Iterator[tuple[str, dict[str, dict]]]:
    """Of each committed result of a GPU its name, such as H100, and its sections."""
    for path in sorted(RESULTS.glob("nvidia-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        device = result["environment"]["device"].split()[1]
        sections = result["sections"].items()
        yield device, {name: section["data"] for name, section in sections}


def range_words(figures: list[float], digits: int) -> str:
    """Such as "1.02 to 1.25", or the one figure that there is."""
    if not figures:
        return ""
    least, most = (f"{f(figures):.{digits}f}" for f in (min, max))
    return least if least == most else f"{least} to {most}"


def gpu_speeds() -> list[Speed]:
    """What the committed results of GPUs have; of Liger with all its kernels, unless
    its norms alone were measured.
    """
    found = []
    for device, sections in gpu_results():
        for name, section in SECTIONS.items():
            data = sections.get(section, {})
            for variant, theirs in IN_A_GPU_RESULT.items():
                phases = _compared(data.get("phases", {}), theirs)
                if phases:
                    found.append(Speed(name, variant, device, data["liger"], phases))
    whole = [s for s in found if s.variant == "liger" and not s.of_its_norms_alone]
    return [speed for speed in found if not (whole and speed.of_its_norms_alone)]


def _compared(phases: dict, variant: str) -> dict[str, tuple[dict, dict]]:
    entries = {}
    for phase in SPEEDS:
        measured = phases.get(phase, {}).get(variant, {"error": "not measured"})
        if "error" not in measured:
            entries[phase] = measured, phases[phase][UNPATCHED]
    return entries


def _of(speeds: list[Speed], model: str, variant: str) -> list[Speed]:
    return [s for s in speeds if (s.model, s.variant) == (model, variant)]


def _ranges(speeds: list[Speed], model: str, variant: str) -> list[str]:
    """For each phase the medians' range over all results."""
    cells = []
    for phase in SPEEDS:
        chosen = [s for s in _of(speeds, model, variant) if phase in s.phases]
        cells.append(range_words([times_as_fast(*s.phases[phase]) for s in chosen], 2))
    return cells


def _devices(speeds: list[Speed]) -> str:
    return " and ".join(dict.fromkeys(speed.device for speed in speeds))


def _speed_note(speeds: list[Speed]) -> str:
    note = f"Speed: over Hugging Face, medians, eight layers, {_devices(speeds)}."
    if any(speed.of_its_norms_alone for speed in speeds):
        note += " Liger's speed is that of its norms alone, its other columns of all its kernels."
    return note


def speeds_table() -> list[str]:
    """The lines of a table with each model's speeds in each result of a GPU."""
    header = ["over Hugging Face: median (rounds)", *SPEEDS.values()]
    rows = []
    for speed in gpu_speeds():
        if speed.variant == "eager":
            continue
        cells = [f"{speed.model}, {speed.words}, {speed.device}"]
        for phase in SPEEDS:
            entries = speed.phases.get(phase)
            cells.append(speed_words(*entries) if entries else "")
        rows.append(cells)
    return markdown(header, rows)


def felt_table() -> list[str]:
    """The lines of README's table: what a user of each variant feels, as ranges over
    the results of GPUs, and of a note. What was not run has no row.
    """
    speeds = gpu_speeds()
    rows = []
    for model in SECTIONS:
        for variant in ("eager", "liger", "hf_rmsnorm"):
            if chosen := _of(speeds, model, variant):
                cells = [*_ranges(speeds, model, variant), _memory_range(chosen)]
                rows.append([f"{model}, {chosen[0].words}", *cells])
    chosen = _of(speeds, "Llama-3.1-8B", "hf_rmsnorm")
    rounds = [speed_range(*speed.phases["decode"]) for speed in chosen]
    least, most = min(least for least, _ in rounds), max(most for _, most in rounds)
    note = (
        f"Times as fast as Hugging Face, and the peak memory of a training step: medians "
        f"of five rounds on {_devices(speeds)}, Liger on the H100 alone. Single rounds of "
        f"decoding Llama: {least:.2f} to {most:.2f}. Llama's rotary embedding was not "
        "yet fused in these runs."
    )
    header = [
        "eight layers, bf16",
        "prefill",
        "training",
        "decoding",
        "training memory",
    ]
    return [*markdown(header, rows), "", note]


def _memory_range(speeds: list[Speed]) -> str:
    """The peak of a training step over the unpatched model's, in percent."""
    shares = []
    for speed in speeds:
        if "train" in speed.phases:
            measured, unpatched = speed.phases["train"]
            shares.append(100 * measured["peak_gb"] / unpatched["peak_gb"])
    words = range_words(shares, 0)
    return words and f"{words}%"


TABLES = {
    "layer": lambda: models_table(committed()),
    "felt": felt_table,
    "layer row": lambda: row_table(committed()),
    "speeds": speeds_table,
}


def _counted(counts: dict) -> list[str]:
    return [
        str(counts["decode"]["kernels"]),
        str(counts["prefill"]["kernels"]),
        f"{counts['prefill']['fusible_bytes_per_token'] / 1000:.0f} kB",
        f"{counts['saved_bytes_per_token'] / 1000:.0f} kB",
        f"{counts['equal_to_eager']:.0%}",
    ]
