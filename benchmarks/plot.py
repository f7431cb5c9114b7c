"""Pictures of results: bandwidth against size with the copy as the roof; host costs;
the losses of training runs.
"""

from __future__ import annotations

from pathlib import Path

from hf_rmsnorm.cli.common import CliError


def load_matplotlib():
    """matplotlib.pyplot, which draws into files."""
    try:
        from matplotlib import pyplot
    except ImportError:
        raise CliError("--plot needs matplotlib: pip install matplotlib") from None
    pyplot.switch_backend("Agg")
    return pyplot


def save_figure(plt, figure, file: Path) -> None:
    """Write a figure where --plot says, and close it."""
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        cure = "pass another file with --plot"
        raise CliError(f"cannot write {file}: {error}; {cure}") from error
    finally:
        plt.close(figure)


def draw(plt, result: dict):
    """A figure of a "kernels", "host" or "train" result with something to draw. `plt`
    is matplotlib.pyplot.
    """
    if result["bench"] == "kernels":
        return _bandwidth(plt, result)
    if result["bench"] == "train":
        return _losses(plt, result, result["device"])
    return _host(plt, result)


def save_losses(data: dict, device: str | None, file: Path) -> None:
    """Draw the losses of training runs, which benchmarks/training.py measured."""
    plt = load_matplotlib()
    save_figure(plt, _losses(plt, data, device), file)


def _bandwidth(plt, result: dict):
    from benchmarks.peers import Case

    kinds = list(dict.fromkeys(case["kind"] for case in result["cases"]))
    directions = ("forward", "backward")
    size = (12, 3.6 * len(kinds))
    figure, grid = plt.subplots(
        len(kinds), 2, figsize=size, squeeze=False, layout="constrained"
    )
    for kind, row in zip(kinds, grid, strict=True):
        cases = [case for case in result["cases"] if case["kind"] == kind]
        for direction, axes in zip(directions, row, strict=True):
            lines: dict[str, list] = {}
            for case in cases:
                made = Case(kind, tuple(case["shape"]))
                touched = (
                    made.elements
                    * made.passes(direction)
                    * _itemsize(case["dtype"])
                    / 1e6
                )
                for name, entry in case["implementations"].items():
                    if "gb_per_s" in entry.get(direction, {}):
                        differs = "*" if entry["gate"]["failures"] else ""
                        lines.setdefault(name + differs, []).append(
                            (touched, entry[direction]["gb_per_s"])
                        )
            for name, points in lines.items():
                axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
            axes.axhline(
                result["copy_gb_per_s"]["best"],
                color="black",
                linestyle="--",
                label="copy",
            )
            axes.set(
                xscale="log", xlabel="MB that must move", ylabel="GB/s", ylim=(0, None)
            )
            axes.set_title(f"{kind}, {direction}")
            axes.legend(fontsize=7)
    figure.suptitle(f"{result['device']}, cold L2 (* fails the gate against float64)")
    return figure


def _itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _host(plt, result: dict):
    cases = result["cases"]
    figure, grid = plt.subplots(
        1, len(cases), figsize=(5 * len(cases), 4), squeeze=False, layout="constrained"
    )
    for axes, (case, entries) in zip(grid[0], cases.items(), strict=True):
        for i, mode in enumerate(("inference", "forward", "forward+backward")):
            timed = {
                name: entry[mode]["us"]
                for name, entry in entries.items()
                if mode in entry
            }
            axes.barh(
                [k + 0.27 * i for k in range(len(timed))],
                timed.values(),
                height=0.25,
                label=mode,
            )
        axes.set_yticks([k + 0.27 for k in range(len(timed))], timed, fontsize=8)
        axes.invert_yaxis()
        axes.set(xlabel="host us per call", title=case)
        axes.legend(fontsize=7)
    figure.suptitle(result["device"] or "CPU, launches stubbed")
    return figure


# The last is drawn on top: this package's line, thin on the unpatched model's wide one.
_LINES = {
    "liger": {"color": "#bf8700", "label": "Liger"},
    "patch_model_liger": {
        "color": "#1a7f37",
        "label": "hf-rmsnorm with Liger's MLP and loss",
    },
    "unpatched": {"color": "#c0c7cf", "linewidth": 4, "label": "Hugging Face"},
    "patch_model": {"color": "#0969da", "linewidth": 1, "label": "hf-rmsnorm"},
}


def _losses(plt, data: dict, device: str | None):
    models = data["models"]
    size = (6 * len(models), 4)
    figure, grid = plt.subplots(
        1, len(models), figsize=size, squeeze=False, layout="constrained"
    )
    for axes, (name, entries) in zip(grid[0], models.items(), strict=True):
        for variant, style in _LINES.items():
            if "losses" in entries.get(variant, {}):
                axes.plot(entries[variant]["losses"], **style)
        axes.set(xlabel="step", ylabel="loss", title=name)
        axes.legend(fontsize=7)
    where = device or "CPU"
    if data["rehearsal"]:
        where = f"REHEARSAL of tiny models, {where}: it shows nothing"
    figure.suptitle(f"Training on this repository's text, {where}")
    return figure
