"""Tables of Markdown from the result of `python -m benchmarks layer`: `TABLES` has
those of the documentation.
"""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "scripts/results"
GPU = "nvidia-h100-80gb-hbm3-2026-11-25.json"  # the newest with Liger
NEWEST = "nvidia-h200-2026-11-26.json"
VARIANTS = {"eager": "Hugging Face", "liger": "Liger", "hf_rmsnorm": "hf-rmsnorm"}
COUNTED = (
    "kernels, decoding",
    "kernels, prefill",
    "moved per token",
    "kept per token",
    "equal bits",
)
SPEEDS = {
    "prefill": "speed, prefill",
    "train": "speed, training",
    "decode": "speed, decoding",
}
# of a result of `python -m benchmarks gpu`
SECTIONS = {"Llama-3.1-8B": "llama", "Qwen3-8B": "qwen3"}
IN_A_GPU_RESULT = {"eager": "unpatched", "liger": "liger", "hf_rmsnorm": "patch_model"}
NOTE = (
    "Moved: bytes that norms, residual sums and the rotary embedding read and write. "
    "Kept: activations that training keeps. Liger fuses the MLP too."
)


def committed() -> dict:
    """The committed result."""
    return json.loads((RESULTS / "layer.json").read_text(encoding="utf-8"))


def models_table(data: dict, names: list[str] | None = None) -> list[str]:
    """The lines of a table with a row for each model and variant, and of a note;
    `names`: of these models alone.

    It has speeds where one of the models was measured on a GPU.
    """
    names = names or list(data["models"])
    speeds, device = gpu_speeds(GPU)
    timed = any(name in speeds for name in names)
    header = ["one decoder layer, bf16", *COUNTED]
    note = NOTE
    if timed:
        header += SPEEDS.values()
        note += (
            f" Speed: over Hugging Face, eight layers, one {device}; Liger's speed is "
            "that of its norms, its other columns of all its kernels."
        )
    rows = []
    for name in names:
        for variant, words in VARIANTS.items():
            counts = data["models"][name].get(variant)
            if counts is None:
                continue
            cells = [f"{name}, {words}", *_counted(counts)]
            if timed:
                cells += speeds.get(name, {}).get(variant, [""] * len(SPEEDS))
            rows.append(cells)
    return [*_table(header, rows), "", note]


def row_table(data: dict) -> list[str]:
    """The lines of a table with the counts of a norm's kernels for one row, as compiled
    for an H100.
    """
    row = data["row"]
    ways, units = ("forward", "backward"), ("instructions", "sectors")
    header = [
        f"RMSNorm, a row of {row['hidden_size']}, bf16",
        *(f"{way}: {unit}" for way in ways for unit in units),
    ]
    rows = []
    for variant, words in VARIANTS.items():
        if variant in row["forward"]:
            rows.append(
                [
                    words,
                    *(
                        f"{row[way][variant][unit]:.0f}"
                        for way in ways
                        for unit in units
                    ),
                ]
            )
    return _table(header, rows)


def newest_speeds() -> list[str]:
    """The lines of a table with the speeds of the newest result of a GPU."""
    speeds, device = gpu_speeds(NEWEST)
    header = [f"over Hugging Face, eight layers, {device}", *SPEEDS.values()]
    rows = [[name, *speeds[name]["hf_rmsnorm"]] for name in SECTIONS]
    return _table(header, rows)


def gpu_speeds(file: str) -> tuple[dict, str]:
    """By model and variant the speeds over Hugging Face in the result of a GPU, and the
    name of that GPU.
    """
    result = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    models = {}
    for name, section in SECTIONS.items():
        phases = result["sections"][section]["data"]["phases"]
        models[name] = {
            variant: [_speed(phases[phase].get(theirs)) for phase in SPEEDS]
            for variant, theirs in IN_A_GPU_RESULT.items()
        }
    return models, result["environment"]["device"]


TABLES = {
    "layer": lambda: models_table(committed()),
    "layer in short": lambda: models_table(committed(), list(SECTIONS)),
    "layer row": lambda: row_table(committed()),
    "newest speeds": newest_speeds,
}


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _counted(counts: dict) -> list[str]:
    return [
        str(counts["decode"]["kernels"]),
        str(counts["prefill"]["kernels"]),
        f"{counts['prefill']['fusible_bytes_per_token'] / 1000:.0f} kB",
        f"{counts['saved_bytes_per_token'] / 1000:.0f} kB",
        f"{counts['equal_to_eager']:.0%}",
    ]


def _speed(measured: dict | None) -> str:
    if measured is None or "error" in measured:
        return ""
    return f"{measured.get('speedup', 1.0):.2f}"
