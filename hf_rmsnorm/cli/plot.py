"""``--plot FILE``: pictures of results, by matplotlib, which is an extra."""

import os
from argparse import ArgumentTypeError
from collections.abc import Iterator
from pathlib import Path

NAMES = ("Hugging Face", "hf-rmsnorm")


def add_plot(parser, what: str) -> None:
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=_file,
        help=f"also draw {what}, as .png, .svg or .pdf (needs matplotlib)",
    )


def _file(text: str) -> Path:
    """Where to draw; refused before any work if that cannot be done."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ArgumentTypeError("needs matplotlib: pip install matplotlib") from None
    file = Path(text).absolute()
    kinds = Figure().canvas.get_supported_filetypes()
    if file.suffix[1:] not in kinds or not os.access(file.parent, os.W_OK):
        raise ArgumentTypeError(
            f"cannot draw {file}: name a .png, .svg or .pdf in a folder that can be "
            "written"
        )
    return file


def draw_times(file: Path, title: str, phases: dict[str, list[float]]) -> None:
    """A bar of milliseconds for each model, in a panel for each phase."""
    for panel, times in _panels(file, title, phases):
        bars = panel.bar(NAMES, times, color=["0.6", "tab:blue"])
        panel.bar_label(bars, fmt="{:.4g}")
        panel.margins(y=0.1)
        panel.set_ylabel("ms, less is better")


def draw_errors(file: Path, title: str, runs: dict[str, list]) -> None:
    """The RMS error of each model behind each layer, in a panel for each dtype.

    Args:
        runs: by dtype what `errors_by_layer` returned.
    """
    for panel, floors in _panels(file, title, runs):
        layers = range(1, len(floors) + 1)
        rms = [(floor.reference_rms, floor.candidate_rms) for floor in floors]
        panel.semilogy(layers, rms, "o-", alpha=0.6, label=NAMES)
        panel.set_xlabel("layer, the last with the final norm")
        panel.set_ylabel("RMS error to float64")
        panel.legend()


def _panels(file: Path, title: str, shown: dict[str, list]) -> Iterator[tuple]:
    """(an empty panel, the data to show in it), by name; saved after the last one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(shown), 3.6), layout="constrained")
    figure.suptitle(title)
    (panels,) = figure.subplots(1, len(shown), squeeze=False)
    for panel, (name, values) in zip(panels, shown.items(), strict=True):
        panel.set_title(name)
        yield panel, values
    figure.savefig(file, dpi=150)
