"""Print the tables of an earlier result of `gpu`."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import tables
from hf_rmsnorm.cli.common import CliError, Result

# The last is drawn on top: this package's line, thin on the unpatched model's wide one.
LINES = {
    "liger": {"color": "#bf8700", "label": "Liger"},
    "patch_model_liger": {
        "color": "#1a7f37",
        "label": "hf-rmsnorm with Liger's MLP and loss",
    },
    "unpatched": {"color": "#c0c7cf", "linewidth": 4, "label": "Hugging Face"},
    "patch_model": {"color": "#0969da", "linewidth": 1, "label": "hf-rmsnorm"},
}


def add_arguments(parser) -> None:
    add = parser.add_argument
    help = "what `python -m benchmarks gpu` wrote"
    add("file", metavar="FILE", type=Path, help=help)
    help = "also draw the losses of its training runs (needs matplotlib)"
    add("--plot", metavar="PNG", type=Path, help=help)


def run(args) -> Result:
    try:
        result = json.loads(args.file.read_text(encoding="utf-8"))
        if args.plot is not None:
            data = result["sections"].get("train", {}).get("data", {})
            save_losses(data, result["environment"]["device"], args.plot)
        return Result(result, report(result))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(
            f"{args.file} is no result of gpu: {type(error).__name__}: {error}"
        ) from error


def save_losses(data: dict, device: str | None, file: Path) -> None:
    """Draw what benchmarks/training.py measured."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CliError("--plot needs matplotlib: pip install matplotlib") from None
    models = data.get("models")
    if not models:
        raise CliError("nothing to draw: the result has no training runs")
    figure = Figure(figsize=(6 * len(models), 4), layout="constrained")
    places = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, (name, entries) in zip(places, models.items(), strict=True):
        for variant, style in LINES.items():
            if losses := entries.get(variant, {}).get("losses"):
                axes.plot(losses, **style)
        axes.set(xlabel="step", ylabel="loss", title=name)
        axes.legend(fontsize=7)
    where = device or "CPU"
    if data["rehearsal"]:
        where = f"REHEARSAL of tiny models, {where}: it shows nothing"
    figure.suptitle(f"Training on this repository's text, {where}")
    figure.savefig(file, dpi=150)


def report(result: dict) -> str:
    """Every section's outcome and figures. `result` is the content of a result file."""
    environment, sections = result["environment"], result["sections"]
    lines = [tables.heading(environment)]
    if result["dry_run"]:
        lines.append("DRY RUN on the CPU: the times below mean nothing")
    rows = [("section", "status", "seconds", "")]
    for name, section in sections.items():
        notes = [section.get("reason", ""), *section["failures"]]
        note = "; ".join(filter(None, notes))[:160]
        rows.append((name, section["status"], section.get("seconds"), note))
    lines += ["", *tables.columns(rows)]
    for name, section in sections.items():
        data = section["data"]
        if not data:
            continue
        lines += ["", *_PRINTERS.get(name, _model)(name, data)]
        skipped = data.get("skipped", ())
        if name != "tests":
            lines += [f"skipped, time ran out: {what}" for what in skipped]
        lines += tables.peers(data)
        if "liger" in data:
            lines.append(f"liger: {data['liger']}")
    return "\n".join(lines)


def _tests(name: str, data: dict) -> list[str]:
    counts = data.get("counts", {}).items()
    lines = ["tests: " + ", ".join(f"{count} {outcome}" for outcome, count in counts)]
    for test in data.get("failed", ()):
        message, _, _ = test["message"].partition("\n")
        lines.append(f"  FAILED {test['name']}: {message}")
    return lines


def _model(name: str, data: dict) -> list[str]:
    lines = []
    for phase, variants in data.get("phases", {}).items():
        lines += tables.phase(f"{name}-shaped, 8 layers, {phase}", variants)
    return lines


_PRINTERS = {
    "tests": _tests,
    "kernels": lambda name, data: tables.kernels(data),
    "host": lambda name, data: tables.host(data),
    "train": lambda name, data: tables.training(data),
}
