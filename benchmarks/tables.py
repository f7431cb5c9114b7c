"""Results as text in aligned columns."""

from __future__ import annotations

from collections.abc import Iterable

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
    aligned = [_aligned(column) for column in zip(*rows, strict=True)]
    return ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]


def _aligned(column: tuple) -> list[str]:
    """The cells of a column, each as wide as the widest."""
    cells = [cell(value) for value in column]
    width = max(map(len, cells))
    if any(isinstance(value, (int, float)) for value in column):
        return [text.rjust(width) for text in cells]
    return [text.ljust(width) for text in cells]


def table(title: str, rows: list[tuple]) -> str:
    """A table whose first row is its header."""
    return "\n".join([title, *columns(rows)])


def markdown(header: Iterable[str], rows: Iterable[Iterable]) -> list[str]:
    """The lines of a table for the documentation."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def heading(environment: dict) -> str:
    """Where a result was measured."""
    versions = environment["versions"].items()
    packages = " ".join(f"{name} {version}" for name, version in versions if version)
    device = environment["device"] or "no GPU"
    return f"{device}, driver {environment['driver']}, {packages}"


def peers(data: dict) -> list[str]:
    """The versions of other libraries, or why they were not measured."""
    return [f"{peer}: {version}" for peer, version in data.get("peers", {}).items()]


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


def kernels(data: dict) -> list[str]:
    """The tables of what benchmarks/kernels.py measured."""
    made = [_case(case) for case in data.get("cases", [])]
    if copy := data.get("copy_gb_per_s"):
        words = "x ours: its time over ours, * other numerics"
        made.insert(0, f"copy: {copy['best']:.0f} GB/s; {words}")
    return made


def _case(case: dict) -> str:
    entries = case["implementations"]
    timed = any("us" in entry.get("forward", {}) for entry in entries.values())
    directions = ("forward", "backward") if timed else ()
    header = ["implementation"]
    for way in directions:
        header += [f"{way} us", "of copy", "x ours"]
    rows = [(*header, "saved B/row", "gate")]
    for name, entry in entries.items():
        row = [name]
        for way in directions:
            timing = entry.get(way, {})
            row += timing.get("us"), timing.get("of_copy")
            row.append(_mark(entry, timing.get("times_ours")))
        row += entry.get("saved_bytes_per_row"), verdict(entry)[:90]
        rows.append(tuple(row))
    title = f"{case['case']} {case['dtype']}"
    if case.get("cold") is False:
        title += ", in cache"
    return table(title, rows)


_MODES = ("inference", "forward", "forward+backward")


def host(data: dict) -> list[str]:
    """The tables of what benchmarks/host.py measured."""
    made = []
    for case, entries in data.get("cases", {}).items():
        rows = [("median (least)", *_MODES, "torch operators", "")]
        for name, entry in entries.items():
            taken = [entry.get(mode) for mode in _MODES]
            times = [one and "{us:.1f} ({us_min:.1f})".format(**one) for one in taken]
            error = entry.get("error", "")[:60]
            rows.append((name, *times, entry.get("operators"), error))
        made.append(table(f"host us per call, {case}", rows))
    if decoding := data.get("decoding"):  # in the results of 2026-11
        made.append(_of_layers("host us, least", decoding, "{:.3g}"))
    if layers := data.get("decoder_layer"):
        words = "{0[us]:.0f} ({0[us_p25]:.0f} to {0[us_p75]:.0f})"
        made.append(_of_layers("host us, median (quartiles)", layers, words))
    for what, ratio in data.get("ratios", {}).items():  # of 2026-11
        made.append(f"hf_rmsnorm, {what}: {cell(ratio)}")
    return made


def _of_layers(title: str, layers: dict, words: str) -> str:
    rows = [("a decoder layer, one token", *next(iter(layers.values())))]
    for name, kinds in layers.items():
        rows.append((name, *(words.format(kind) for kind in kinds.values())))
    return table(title, rows)


_OF_A_PHASE = ("tokens/s", "ms", "x unpatched (rounds)", "peak GB", "memory", "")
_OF_A_RUN = ("tokens/s (least to most)", "x unpatched", "peak GB", "memory")
_OF_A_RUN += ("first loss", "last", "most beside unpatched", "")


def phase(title: str, variants: dict[str, dict]) -> list[str]:
    """What benchmarks/models.py measured of one phase, as aligned lines."""
    rows = [(title, *_OF_A_PHASE)]
    for variant, entry in variants.items():
        speed = None
        if "speedup" in entry:
            speed = speed_words(entry, variants[UNPATCHED])
        times = entry.get("tokens_per_s"), entry.get("ms"), speed
        memory = entry.get("peak_gb"), entry.get("memory_ratio")
        rows.append((variant, *times, *memory, entry.get("error", "")[:120]))
    return columns(rows)


def training(data: dict) -> list[str]:
    """The tables of what benchmarks/training.py measured."""
    made = []
    for name, entries in data.get("models", {}).items():
        rows = [(f"{name}, trained", *_OF_A_RUN)]
        for variant, entry in entries.items():
            rows.append((variant, *_of_a_run(entry)))
        made += columns(rows)
    if data.get("rehearsal"):
        made.append("a rehearsal of tiny models: speeds and losses mean nothing")
    return made


def _of_a_run(entry: dict) -> tuple:
    if "error" in entry:
        return *[None] * 7, entry["error"][:90]
    speed = "{tokens_per_s:.0f} ({tokens_per_s_min:.0f} to {tokens_per_s_max:.0f})"
    beside = [entry.get(key) for key in ("speedup", "peak_gb", "memory_ratio")]
    first, *_, last = entry["losses"]
    most = entry.get("max_abs_dloss")
    return speed.format(**entry), *beside, first, last, most, ""
