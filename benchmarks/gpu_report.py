"""Print the tables of an earlier result of `gpu`."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import tables
from benchmarks.losses import save_losses
from hf_rmsnorm.cli.common import CliError, Result


def add_arguments(parser) -> None:
    parser.add_argument(
        "file", metavar="FILE", type=Path, help="what `python -m benchmarks gpu` wrote"
    )
    parser.add_argument(
        "--plot",
        metavar="PNG",
        type=Path,
        help="also draw the losses of its training runs (needs matplotlib)",
    )


def run(args) -> Result:
    try:
        result = json.loads(args.file.read_text(encoding="utf-8"))
        if args.plot is not None:
            _draw(result, args.plot)
        return Result(result, report(result))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(
            f"{args.file} is no result of gpu: {type(error).__name__}: {error}"
        ) from error


def _draw(result: dict, picture: Path) -> None:
    data = result["sections"].get("train", {}).get("data", {})
    if not data.get("models"):
        raise CliError("nothing to draw: the result has no training runs")
    save_losses(data, result["environment"]["device"], picture)


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
