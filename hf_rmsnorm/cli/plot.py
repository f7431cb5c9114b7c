"""``--plot FILE``: pictures of results, by matplotlib, which is an extra."""

import argparse
import os
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
        cure = "needs matplotlib: pip install matplotlib"
        raise argparse.ArgumentTypeError(cure) from None
    file = Path(text)
    if file.suffix[1:] not in Figure().canvas.get_supported_filetypes():
        wrong = f"{file} has no ending of a picture: name it .png, .svg or .pdf"
        raise argparse.ArgumentTypeError(wrong)
    if not os.access(file.absolute().parent, os.W_OK):
        wrong = f"{file.absolute().parent} cannot be written: name a folder that can"
        raise argparse.ArgumentTypeError(wrong)
    return file


def draw_times(file: Path, title: str, phases: dict[str, list[float]]) -> None:
    """A bar of milliseconds for each model, in a panel for each phase."""
    figure, panels = _panels(title, len(phases))
    for panel, (phase, times) in zip(panels, phases.items(), strict=True):
        bars = panel.bar(NAMES, times, color=["0.6", "tab:blue"])
        panel.bar_label(bars, fmt="{:.4g}")
        panel.margins(y=0.1)
        panel.set(title=phase, ylabel="ms, less is better")
    figure.savefig(file, dpi=150)


def draw_errors(file: Path, title: str, runs: dict[str, list]) -> None:
    """The RMS error of each model behind each layer, in a panel for each dtype.

    Args:
        runs: by dtype what `errors_by_layer` returned.
    """
    figure, panels = _panels(title, len(runs))
    for panel, (dtype, floors) in zip(panels, runs.items(), strict=True):
        layers = range(1, len(floors) + 1)
        own = [floor.reference_rms for floor in floors]
        ours = [floor.candidate_rms for floor in floors]
        for errors, name, style in zip((own, ours), NAMES, ("o-", "x--"), strict=True):
            panel.semilogy(layers, errors, style, label=name)
        what = {
            "xlabel": "layer, the last with the final norm",
            "ylabel": "RMS error to float64",
        }
        panel.set(title=dtype, **what)
        panel.legend()
    figure.savefig(file, dpi=150)


def _panels(title: str, count: int):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * count, 3.6), layout="constrained")
    figure.suptitle(title)
    (panels,) = figure.subplots(1, count, squeeze=False)
    return figure, panels
