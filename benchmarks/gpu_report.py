"""Print the tables of an earlier result of `gpu`."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import plot
from benchmarks import tables as bench_tables
from benchmarks.tables import columns
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
        return Result(result, tables(result))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CliError(
            f"{args.file} is no result of gpu: {type(error).__name__}: {error}"
        ) from error


def _draw(result: dict, picture: Path) -> None:
    data = result["sections"].get("train", {}).get("data", {})
    if not data.get("models"):
        raise CliError("nothing to draw: the result has no training runs")
    plot.save_losses(data, result["environment"]["device"], picture)


def tables(result: dict) -> str:
    """Every section's outcome and figures. `result` is the content of a result file."""
    environment, sections = result["environment"], result["sections"]
    versions = " ".join(
        f"{name} {version}"
        for name, version in environment["versions"].items()
        if version
    )
    device = environment["device"] or "no GPU"
    if result["dry_run"]:
        device = "DRY RUN on the CPU: the times below mean nothing"
    lines = [f"{device}, driver {environment['driver']}, {versions}", ""]
    rows = [("section", "status", "seconds", "")]
    for name, section in sections.items():
        notes = [section.get("reason", ""), *section["failures"]]
        rows.append(
            (
                name,
                section["status"],
                section.get("seconds"),
                "; ".join(n for n in notes if n)[:160],
            )
        )
    lines += columns(rows)
    for name, section in sections.items():
        if section["data"]:
            lines += ["", *PRINTERS.get(name, model)(name, section["data"])]
    return "\n".join(lines)


def tests(name: str, data: dict) -> list[str]:
    lines = [
        "tests: "
        + ", ".join(
            f"{count} {outcome}" for outcome, count in data.get("counts", {}).items()
        )
    ]
    lines += [
        f"  FAILED {test['name']}: {test['message'].partition(chr(10))[0]}"
        for test in data.get("failed", ())
    ]
    return lines


def kernels(name: str, data: dict) -> list[str]:
    return (
        bench_tables.kernels(data)
        + [f"skipped, time ran out: {c}" for c in data.get("skipped", ())]
        + _peers(data)
    )


def host(name: str, data: dict) -> list[str]:
    return bench_tables.host(data) + _peers(data)


def model(name: str, data: dict) -> list[str]:
    lines = []
    for phase, variants in data.get("phases", {}).items():
        title = f"{name}-shaped, 8 layers, {phase}"
        lines += bench_tables.phase(title, variants)
    lines += [f"skipped, time ran out: {what}" for what in data.get("skipped", ())]
    if "liger" in data:
        lines.append(f"liger: {data['liger']}")
    return lines


def _peers(data: dict) -> list[str]:
    return [f"{peer}: {version}" for peer, version in data.get("peers", {}).items()]


def train(name: str, data: dict) -> list[str]:
    return bench_tables.training(data)


PRINTERS = {"tests": tests, "kernels": kernels, "host": host, "train": train}
