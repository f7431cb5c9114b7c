"""Results as text: tables of the rich library if it is installed, else aligned columns."""

from __future__ import annotations

import io
import shutil
import sys

from benchmarks.speed import UNPATCHED, speed_words


def cell(value) -> str:
    """Floats with three digits that matter, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def columns(rows: list[tuple]) -> list[str]:
    """Rows of cells as aligned lines, text to the left and figures to the right."""
    cells, left = [[cell(value) for value in row] for row in rows], _text_columns(rows)
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(
            c.ljust(w) if is_left else c.rjust(w)
            for c, w, is_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in cells
    ]


def _text_columns(rows: list[tuple]) -> list[bool]:
    return [
        all(not isinstance(row[i], (int, float)) for row in rows)
        for i in range(len(rows[0]))
    ]


def table(title: str, rows: list[tuple]) -> str:
    """A table whose first row is its header."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:  # an extra
        return "\n".join([title, *columns(rows)])
    made = Table()
    for name, is_left in zip(rows[0], _text_columns(rows), strict=True):
        made.add_column(escape(cell(name)), justify="left" if is_left else "right")
    for row in rows[1:]:
        made.add_row(*(escape(cell(value)) for value in row))
    out, terminal = io.StringIO(), sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else 200
    Console(file=out, force_terminal=terminal, width=width).print(made)
    return "\n".join(
        [title, *(line.rstrip() for line in out.getvalue().rstrip().splitlines())]
    )


def text(result: dict) -> str:
    """A result of benchmarks/command.py for people. `result` is what `--json` prints."""
    device = result["device"] or "CPU"
    versions = " ".join(
        f"{name} {version}" for name, version in result["versions"].items() if version
    )
    parts = [f"{device}: {versions}", *_TABLES[result["bench"]](result)]
    parts += [f"{peer}: {found}" for peer, found in result.get("peers", {}).items()]
    parts += [f"not measured here: {reason}" for reason in result["not_measured"]]
    return "\n".join(parts)


def verdict(entry: dict) -> str:
    """The gate's verdict on an implementation, in a few words."""
    if entry.get("error"):
        return entry["error"]
    gate = _gate(entry)
    if gate["failures"]:
        what = "FAILED" if gate.get("raised") else "NUMERICS DIFFER"
        return f"{what}: {gate['failures'][0]}"
    equal = gate.get("bit_equal_to_hf", 1)
    if equal >= 0.99:
        return "ok"
    return f"ok, rounds otherwise: {equal:.0%} of bits as Hugging Face"


def _gate(entry: dict) -> dict:
    """The gate of an implementation; a shortened result has a list of its failures."""
    gate = entry.get("gate", [])
    return {"failures": gate} if isinstance(gate, list) else gate


def _mark(entry: dict, ratio: float | None) -> str | None:
    if ratio is None:
        return None
    gate = _gate(entry)
    differs = gate["failures"] or gate.get("bit_equal_to_hf", 1) < 0.99
    return f"{ratio:.2f}{'*' if differs else ''}"


def kernels(result: dict) -> list[str]:
    """The tables of what benchmarks/kernels.py measured."""
    made = []
    if result.get("copy_gb_per_s"):
        made.append(
            f"copy: {result['copy_gb_per_s']['best']:.0f} GB/s; x ours: its time over ours, * other numerics"
        )
    pairs = result.get("against_layer_norm", [])
    cases = [
        *result.get("cases", []),
        *(case for pair in pairs for case in pair["cases"]),
    ]
    made += [_case(case) for case in cases]
    if pairs:
        made.append(table("RMSNorm against LayerNorm", _time_saved(pairs)))
    return made


def _case(case: dict) -> str:
    timed = any(
        "us" in entry.get("forward", {}) for entry in case["implementations"].values()
    )
    directions = ("forward", "backward") if timed else ()
    header = ["implementation"]
    for way in directions:
        header += [f"{way} us", "of copy", "of own copy", "x ours"]
    rows = [(*header, "saved B/row", "gate")]
    for name, entry in case["implementations"].items():
        figures = [
            figure
            for way in directions
            for figure in _figures(entry, entry.get(way, {}))
        ]
        rows.append(
            (name, *figures, entry.get("saved_bytes_per_row"), verdict(entry)[:90])
        )
    title = f"{case['case']} {case['dtype']}"
    if case.get("cold") is False:
        title += ", in cache"
    if case.get("models"):
        title += f" ({', '.join(case['models'])})"
    return table(title, rows)


def _figures(entry: dict, timing: dict) -> list:
    figures = [timing.get(key) for key in ("us", "of_copy", "of_own_copy")]
    return [*figures, _mark(entry, timing.get("times_ours"))]


def _time_saved(pairs: list[dict]) -> list[tuple]:
    rows = [("time RMSNorm saves", "hidden", "sequence", "forward", "backward", "both")]
    for pair in pairs:
        for name, saved in pair["time_saved"].items():
            rows.append(
                (
                    name,
                    pair["hidden_size"],
                    pair["sequence"],
                    *(f"{v:.1%}" for v in saved.values()),
                )
            )
    return rows


def host(result: dict) -> list[str]:
    """The tables of what benchmarks/host.py measured."""
    made = []
    for case, entries in result.get("cases", {}).items():
        rows = [("median (least)", *_MODES, "torch operators", "")]
        for name, entry in entries.items():
            figures = [
                f"{entry[m]['us']:.1f} ({entry[m]['us_min']:.1f})"
                if m in entry
                else None
                for m in _MODES
            ]
            rows.append(
                (name, *figures, entry.get("operators"), entry.get("error", "")[:60])
            )
        made.append(table(f"host us per call, {case}", rows))
    if decoding := result.get("decoding"):
        header = ("a decoder layer, one token", *next(iter(decoding.values())))
        made.append(
            table(
                "host us, least",
                [header, *((name, *of.values()) for name, of in decoding.items())],
            )
        )
    if layers := result.get("decoder_layer"):
        header = ("a decoder layer, one token", *next(iter(layers.values())))
        rows = [(name, *map(_quartiles, of.values())) for name, of in layers.items()]
        made.append(table("host us, median (quartiles)", [header, *rows]))
    return made + [
        f"hf_rmsnorm, {what}: {cell(ratio)}"
        for what, ratio in result.get("ratios", {}).items()
    ]


def _quartiles(figures: dict) -> str:
    return "{us:.0f} ({us_p25:.0f} to {us_p75:.0f})".format(**figures)


_MODES = ("inference", "forward", "forward+backward")


def _layers(result: dict) -> list[str]:
    header = (
        "operators + launches before",
        "after",
        "of which launches",
        "saved bytes before",
        "after",
    )
    rows = [("a token and layer", *header)]
    for name, count in result["layers"].items():
        before, after = count["unpatched"], count["patched"]
        row = (name, before["sum"], after["sum"], after["launches"])
        rows.append(
            (*row, before["saved_bytes_per_token"], after["saved_bytes_per_token"])
        )
    return [table("decode, and bytes saved for backward in bf16", rows)]


_COMPARED = (
    "tokens_equal",
    "first_difference",
    "max_abs_dlogit",
    "top1_equal",
    "abs_dloss",
    "error",
)


def phase(title: str, variants: dict[str, dict]) -> list[str]:
    """What benchmarks/models.py measured of one phase, as aligned lines."""
    rows = [
        (
            title,
            "tokens/s",
            "ms",
            "x unpatched (rounds)",
            "peak GB",
            "memory",
            "beside unpatched",
        )
    ]
    for variant, entry in variants.items():
        notes = [f"{k} {cell(entry[k])}" for k in _COMPARED if entry.get(k) is not None]
        speed = None
        if "speedup" in entry:
            speed = speed_words(entry, variants[UNPATCHED])
        figures = entry.get("tokens_per_s"), entry.get("ms"), speed
        memory = entry.get("peak_gb"), entry.get("memory_ratio")
        rows.append((variant, *figures, *memory, ", ".join(notes)[:120]))
    return columns(rows)


def _models(result: dict) -> list[str]:
    made = _layers(result)
    for name, data in result["models"].items():
        title = f"{name}, {data['layers']} layers, {data['dtype']}: {result['phase']}"
        made += phase(title, data["phases"].get(result["phase"], {}))
        made.append(f"liger: {data['liger']}")
    return made


def training(result: dict) -> list[str]:
    """The tables of what benchmarks/training.py measured."""
    made = []
    for name, entries in result.get("models", {}).items():
        rows = [
            (
                f"{name}, trained",
                "tokens/s (least to most)",
                "x unpatched",
                "peak GB",
                "memory",
                "first loss",
                "last",
                "most beside unpatched",
                "",
            )
        ]
        for variant, entry in entries.items():
            if "error" in entry:
                rows.append((variant, *[None] * 7, entry["error"][:90]))
                continue
            speeds = (entry[f"tokens_per_s{at}"] for at in ("", "_min", "_max"))
            speed = "{:.0f} ({:.0f} to {:.0f})".format(*speeds)
            keys = ("speedup", "peak_gb", "memory_ratio")
            figures = (entry.get(key) for key in keys)
            losses = entry["losses"][0], entry["losses"][-1], entry.get("max_abs_dloss")
            rows.append((variant, speed, *figures, *losses, ""))
        made += columns(rows)
    if result.get("rehearsal"):
        made.append("a rehearsal of tiny models: speeds and losses mean nothing")
    made += [f"skipped, time ran out: {what}" for what in result.get("skipped", ())]
    return [*made, f"liger: {result['liger']}"] if "liger" in result else made


_TABLES = {
    "kernels": kernels,
    "host": lambda result: host(result) + _layers(result),
    "generate": _models,
    "train": training,
}
