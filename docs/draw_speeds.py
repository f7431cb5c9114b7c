"""Draws docs/speeds.svg from the committed results of GPUs: how many times as fast as
Hugging Face each variant is, with the range of its rounds.

Run it as ``python -m docs.draw_speeds``.
"""

from pathlib import Path

from benchmarks.layer_table import SPEEDS, Speed, gpu_speeds
from benchmarks.speed import speed_range, times_as_fast

FILE = Path(__file__).with_name("speeds.svg")
COLOURS = {"liger": "#bf8700", "hf_rmsnorm": "#0969da"}
OTHERS = "#8250df"
WIDTH, LEFT, TOP = 760, 236, 84
ROW, BAR = 19, 13  # the height of a row, and of its bar
PANEL, UNIT = 172, 80  # the width of a panel, and of a speed of 1


def drawn(speeds: list[Speed]) -> str:
    """The picture. It has a background, so that it reads on light and on dark pages."""
    speeds = [speed for speed in speeds if speed.variant != "eager"]
    speeds.sort(key=lambda speed: speed.model)
    height = TOP + ROW * len(speeds) + 12
    about = "Times as fast as Hugging Face"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" fill="#1f2328">',
        f"<title>{about}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#f6f8fa"/>',
        _text(16, 24, about, 'font-size="14" font-weight="600"'),
        _text(16, 42, "Bar: median of five rounds. Line: slowest to fastest round."),
    ]
    for number, speed in enumerate(speeds):
        words = f"{speed.model}, {speed.words}, {speed.device}"
        bottom = TOP + number * ROW + 10
        parts.append(
            _text(LEFT - 10, bottom, words, 'text-anchor="end" font-size="11"')
        )
    for place, (phase, title) in enumerate(SPEEDS.items()):
        left = LEFT + place * PANEL
        name = title.removeprefix("speed, ")
        parts.append(_text(left, TOP - 14, name, 'font-weight="600"'))
        for number, speed in enumerate(speeds):
            if phase in speed.phases:
                parts += _bar(left, TOP + number * ROW, speed, phase)
        bottom = TOP + ROW * len(speeds)
        parts.append(_line(left + UNIT, TOP - 6, left + UNIT, bottom, "#1f2328"))
    return "\n".join([*parts, "</svg>", ""])


def _bar(left: float, top: float, speed: Speed, phase: str) -> list[str]:
    median = times_as_fast(*speed.phases[phase])
    least, most = (UNIT * s for s in speed_range(*speed.phases[phase]))
    middle = top + BAR / 2
    fill = COLOURS.get(speed.variant, OTHERS)
    size = f'width="{UNIT * median:.1f}" height="{BAR}"'
    return [
        f'<rect x="{left:g}" y="{top:g}" {size} fill="{fill}" fill-opacity="0.7"/>',
        _line(left + least, middle, left + most, middle, "#1f2328"),
        _text(left + max(most, UNIT) + 4, top + 10, f"{median:.2f}", 'font-size="10"'),
    ]


def _line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line {ends} stroke="{colour}"/>'


def _text(left: float, bottom: float, words: str, style: str = "") -> str:
    return f'<text x="{left:.1f}" y="{bottom:.1f}"{" " * bool(style)}{style}>{words}</text>'


if __name__ == "__main__":
    FILE.write_text(drawn(gpu_speeds()), encoding="utf-8")
