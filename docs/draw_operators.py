"""Draws docs/operators.svg: what a decoder layer launches for one token, before and after the patch.

    python docs/draw_operators.py

The counts are taken here, by running tiny random models of each architecture: how many operators a layer dispatches
does not depend on its size. Without a GPU the kernels run in Triton's interpreter.
"""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads this when it is imported, by the next lines

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

FILE = Path(__file__).resolve().with_name("operators.svg")
sys.path.insert(0, str(FILE.parents[1]))  # the checkout, for benchmarks

from benchmarks.counting import Operators  # noqa: E402
from hf_rmsnorm import count_launches, patch_model, use_backend  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODELS = {"llama": "LLaMA", "qwen3": "Qwen3", "gemma2": "Gemma 2", "gemma3_text": "Gemma 3", "olmo2": "OLMo 2"}
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def decoded_token(model_type: str, layers: int, patch: bool, **options) -> int:
    """Operators (neither views nor allocations) and launches of one decoded token; options are `patch_model`'s."""
    config = AutoConfig.for_model(model_type, num_hidden_layers=layers, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(DEVICE).eval()
    if patch:
        patch_model(model, **options)
    ids = torch.arange(3, 9, device=DEVICE)[None]
    with torch.no_grad(), use_backend("triton"):
        cache = model(ids, use_cache=True).past_key_values
        with Operators() as operators, count_launches() as launches:
            model(ids[:, :1], past_key_values=cache, use_cache=True)
    return operators.computing + launches.total()


def count() -> dict[str, tuple[int, int]]:
    """(before, after) the patch, for one decoder layer of each model: three layers less two."""
    return {
        name: tuple(decoded_token(kind, 3, patch) - decoded_token(kind, 2, patch) for patch in (False, True))
        for kind, name in MODELS.items()
    }


def draw(counts: dict[str, tuple[int, int]], file: Path) -> None:
    import matplotlib

    # Text stays text, and equal counts give equal bytes.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "hf-rmsnorm", "font.size": 11})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(counts))
    for column, (label, colour) in enumerate((("Hugging Face", "#b0b7bf"), ("patched", "#1f6feb"))):
        values = [pair[column] for pair in counts.values()]
        bars = axes.barh([p + 0.2 * (2 * column - 1) for p in places], values, height=0.36, label=label, color=colour)
        axes.bar_label(bars, padding=3)
    axes.set_yticks(places, counts)
    axes.invert_yaxis()
    axes.set_title("Operators and kernel launches of one decoder layer, one token")
    axes.set_xticks([])
    axes.margins(x=0.08)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    counts = count()
    draw(counts, FILE)
    print("\n".join(f"{name:<8} {before:>3} -> {after}" for name, (before, after) in counts.items()))
