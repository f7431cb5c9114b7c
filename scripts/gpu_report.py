"""The tables of a gpu_check result, as text."""

from __future__ import annotations


def tables(result: dict) -> str:
    """Every section's outcome and figures. `result` is the content of a result file."""
    environment, sections = result["environment"], result["sections"]
    versions = " ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    device = environment["device"] or "no GPU"
    if result["dry_run"]:
        device = "DRY RUN on the CPU: the times below mean nothing"
    lines = [f"{device}, driver {environment['driver']}, {versions}", ""]
    rows = [("section", "status", "seconds", "")]
    for name, section in sections.items():
        notes = [section.get("reason", ""), *section["failures"]]
        rows.append((name, section["status"], section.get("seconds"), "; ".join(n for n in notes if n)[:160]))
    lines += columns(rows)
    for name, section in sections.items():
        if section["data"]:
            lines += ["", *PRINTERS.get(name, model)(name, section["data"])]
    return "\n".join(lines)


def columns(rows: list[tuple]) -> list[str]:
    """Rows of cells as aligned lines; floats with three digits that matter, None as a dash."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    # text to the left, figures to the right
    left = [all(not isinstance(row[i], (int, float)) for row in rows) for i in range(len(widths))]
    return [
        "  ".join(
            c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in cells
    ]


def _cell(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def tests(name: str, data: dict) -> list[str]:
    lines = ["tests: " + ", ".join(f"{count} {outcome}" for outcome, count in data.get("counts", {}).items())]
    lines += [f"  FAILED {test['name']}: {test['message'].partition(chr(10))[0]}" for test in data.get("failed", ())]
    return lines


def kernels(name: str, data: dict) -> list[str]:
    lines = []
    if "copy_gb_per_s" in data:
        copies = ", ".join(f"{size} {_cell(speed)}" for size, speed in data["copy_gb_per_s"].items())
        lines.append(f"kernels: copy bandwidth in GB/s: {copies}; us per call, GB/s as a share of the best copy")
    header = ("", "forward", "of copy", "backward", "of copy", "both", "of copy", "both, wall", "bits as HF", "gate")
    for case in data.get("cases", ()):
        cold = "" if case["cold"] else ", in cache"
        lines += ["", f"{case['case']} {case['dtype']}{cold}"]
        rows = [header]
        for implementation, entry in case["implementations"].items():
            figures = []
            for direction in ("forward", "backward", "forward+backward"):
                timing = entry.get(direction, {})
                figures += [timing.get("us"), timing.get("of_copy")]
            wall = entry.get("forward+backward", {}).get("wall_us")
            gate = entry["gate"]
            verdict = entry.get("error") or ("; ".join(gate["failures"])[:60] if gate["failures"] else "ok")
            rows.append((implementation, *figures, wall, gate.get("bit_equal_to_hf"), verdict))
        lines += columns(rows)
    lines += [f"skipped, time ran out: {case}" for case in data.get("skipped", ())]
    return lines + _missing(data)


def host(name: str, data: dict) -> list[str]:
    rows = [("host us per call", "inference", "forward", "forward+backward", "")]
    for implementation, entry in data.get("us_per_call", {}).items():
        figures = [entry.get(key) for key in ("inference", "forward", "forward+backward")]
        rows.append((implementation, *figures, entry.get("error", "")))
    lines = columns(rows)
    if data.get("skipped"):
        lines.append(f"skipped, time ran out: {', '.join(data['skipped'])}")
    return lines + _missing(data)


def model(name: str, data: dict) -> list[str]:
    rows = [
        (f"{name}-shaped, 8 layers", "variant", "tokens/s", "ms", "speedup", "peak GB", "memory", "beside unpatched")
    ]
    for phase, variants in data.get("phases", {}).items():
        for variant, entry in variants.items():
            keys = ("tokens_equal", "first_difference", "max_abs_dlogit", "top1_equal", "abs_dloss", "error")
            notes = ", ".join(f"{key} {_cell(entry[key])}" for key in keys if entry.get(key) is not None)
            figures = [entry.get(k) for k in ("tokens_per_s", "ms", "speedup", "peak_gb", "memory_ratio")]
            rows.append((phase, variant, *figures, notes))
    lines = columns(rows)
    lines += [f"skipped, time ran out: {what}" for what in data.get("skipped", ())]
    if "liger" in data:
        lines.append(f"liger: {data['liger']}")
    return lines


def _missing(data: dict) -> list[str]:
    return [f"{peer}: {version}" for peer, version in data.get("peers", {}).items()]


PRINTERS = {"tests": tests, "kernels": kernels, "host": host}
