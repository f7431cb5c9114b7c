"""The picture of the losses of training runs."""

from __future__ import annotations

from pathlib import Path

from hf_rmsnorm.cli.common import CliError

# The last is drawn on top: this package's line, thin on the unpatched model's wide one.
LINES = {
    "liger": {"color": "#bf8700", "label": "Liger"},
    "patch_model_liger": {
        "color": "#1a7f37",
        "label": "hf-rmsnorm with Liger's MLP and loss",
    },
    "unpatched": {"color": "#c0c7cf", "linewidth": 4, "label": "Hugging Face"},
    "patch_model": {"color": "#0969da", "linewidth": 1, "label": "hf-rmsnorm"},
}


def save_losses(data: dict, device: str | None, file: Path) -> None:
    """Draw what benchmarks/training.py measured.

    Raises:
        CliError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CliError("--plot needs matplotlib: pip install matplotlib") from None
    models = data["models"]
    figure = Figure(figsize=(6 * len(models), 4), layout="constrained")
    for axes, name in zip(
        figure.subplots(1, len(models), squeeze=False)[0], models, strict=True
    ):
        for variant, style in LINES.items():
            losses = models[name].get(variant, {}).get("losses")
            if losses is not None:
                axes.plot(losses, **style)
        axes.set(xlabel="step", ylabel="loss", title=name)
        axes.legend(fontsize=7)
    where = device or "CPU"
    if data["rehearsal"]:
        where = f"REHEARSAL of tiny models, {where}: it shows nothing"
    figure.suptitle(f"Training on this repository's text, {where}")
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        cure = "pass another file with --plot"
        raise CliError(f"cannot write {file}: {error}; {cure}") from error
