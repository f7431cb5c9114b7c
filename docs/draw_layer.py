"""Draws docs/layer.svg from scripts/results/layer.json: what one decoder layer launches
and moves.

Run it as ``python docs/draw_layer.py``. It needs Python alone.
"""

import json
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "scripts/results/layer.json"
FILE = ROOT / "docs/layer.svg"

VARIANTS = {  # words and colour
    "eager": ("Hugging Face", "#8c959f"),
    "liger": ("Liger", "#bf8700"),
    "hf_rmsnorm": ("hf-rmsnorm", "#0969da"),
}
WIDTH, LEFT, TOP = 760, 104, 76
BAR, GAP = 13, 14  # the height of a bar, and the space between two models
LEGEND = (444, 562, 634)
PANEL, LONGEST = 320, 250  # the width of a panel, and of its longest bar


@dataclass(frozen=True)
class Panel:
    """One diagram: where it begins, its title, and by model and variant the lengths of
    its bars with their labels.
    """

    left: int
    title: str
    bars: dict[str, dict[str, tuple[float, str]]]


def panels(models: dict) -> list[Panel]:
    """The two diagrams: kernels, and bytes."""

    def bars(figure) -> dict:
        return {
            name: {variant: figure(counts) for variant, counts in of.items()}
            for name, of in models.items()
        }

    def kernels(counts: dict) -> tuple[float, str]:
        number = counts["decode"]["kernels"]
        return number, str(number)

    def moved(counts: dict) -> tuple[float, str]:
        number = counts["prefill"]["fusible_bytes_per_token"] / 1000
        return number, f"{number:.0f} kB"

    return [
        Panel(LEFT, "Kernels launched, decoding one token", bars(kernels)),
        Panel(
            LEFT + PANEL + 20, "Bytes moved per token: norms, sums, rotary", bars(moved)
        ),
    ]


def drawn(models: dict) -> str:
    """The picture. It has a background, so that it reads on light and on dark pages."""
    row = len(VARIANTS) * BAR + GAP
    height = TOP + row * len(models) + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" fill="#1f2328">',
        "<title>Kernels and bytes of one decoder layer: Hugging Face, Liger, hf-rmsnorm</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#f6f8fa"/>',
        _text(16, 24, "One decoder layer, bf16", 'font-size="14" font-weight="600"'),
        *_legend(),
    ]
    for number, name in enumerate(models):
        middle = TOP + number * row + len(VARIANTS) * BAR / 2 + 4
        parts.append(_text(LEFT - 10, middle, name, 'text-anchor="end"'))
    for panel in panels(models):
        parts += _panel(panel, row)
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> list[str]:
    parts = []
    for left, (words, colour) in zip(LEGEND, VARIANTS.values(), strict=True):
        parts.append(_bar(left, 14, 11, colour))
        parts.append(_text(left + 18, 24, words))
    return parts


def _panel(panel: Panel, row: int) -> list[str]:
    parts = [_text(panel.left, TOP - 16, panel.title, 'font-weight="600"')]
    longest = max(length for of in panel.bars.values() for length, _ in of.values())
    for number, of in enumerate(panel.bars.values()):
        for place, (variant, (_, colour)) in enumerate(VARIANTS.items()):
            if variant not in of:
                continue
            length, label = of[variant]
            width = LONGEST * length / longest
            top = TOP + number * row + place * BAR
            parts.append(_bar(panel.left, top, width, colour))
            parts.append(
                _text(panel.left + width + 5, top + 10, label, 'font-size="11"')
            )
    return parts


def _bar(left: float, top: float, width: float, colour: str) -> str:
    return f'<rect x="{left:g}" y="{top:g}" width="{width:.1f}" height="{BAR - 2}" fill="{colour}"/>'


def _text(left: float, bottom: float, words: str, style: str = "") -> str:
    return f'<text x="{left:.1f}" y="{bottom:.1f}"{" " * bool(style)}{style}>{words}</text>'


if __name__ == "__main__":
    FILE.write_text(
        drawn(json.loads(RESULT.read_text(encoding="utf-8"))["models"]),
        encoding="utf-8",
    )
