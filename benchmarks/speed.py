"""How many times as fast as the unpatched model, from measured rounds."""

from __future__ import annotations

UNPATCHED = "unpatched"  # the variant that others are compared with


def times_as_fast(measured: dict, unpatched: dict) -> float:
    """Of two measurements with ``tokens_per_s`` or ``ms``."""
    if "tokens_per_s" in measured:
        return measured["tokens_per_s"] / unpatched["tokens_per_s"]
    return unpatched["ms"] / measured["ms"]


def speed_range(entry: dict, unpatched: dict) -> tuple[float, float]:
    """The slowest and the fastest round, each over the unpatched model's same round."""
    rounds = zip(entry["samples"], unpatched["samples"], strict=True)
    ratios = [times_as_fast(*pair) for pair in rounds]
    return min(ratios), max(ratios)


def speed_words(entry: dict, unpatched: dict) -> str:
    """Such as "1.25 (0.98 to 1.29)": of the medians, and the range of the rounds."""
    least, most = speed_range(entry, unpatched)
    speed = times_as_fast(entry, unpatched)
    return f"{speed:.2f} ({least:.2f} to {most:.2f})"
