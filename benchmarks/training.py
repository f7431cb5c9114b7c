"""A training run of each variant: the same random model, this repository's own text, the
same batches. Tokens per second, peak memory, and the loss of each step.
"""

from __future__ import annotations

import gc
import hashlib
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.counting import build
from benchmarks.models import broken_together, ratios
from benchmarks.shapes import TINY, TRAINED, ModelShape
from benchmarks.speed import UNPATCHED
from benchmarks.variants import Variant, in_words, timed_variants

ROOT = Path(__file__).resolve().parents[1]
TEXT = ("hf_rmsnorm", "benchmarks", "tests", "docs")
SPECIAL = 3  # tokens of padding, beginning and end, which the text has not
LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Sizes:
    """Of a run; a step has ``batch`` sequences of ``length`` tokens."""

    layers: int = 8
    steps: int = 240
    batch: int = 8
    length: int = 1024

    @property
    def warm_up(self) -> int:
        """The first steps, which are not timed: kernels are compiled in them."""
        return max(1, self.steps // 20)


REHEARSED = Sizes(layers=2, steps=4, batch=2, length=8)


def own_text() -> str:
    """The source and the documents of this repository, always in the same order."""
    paths = []
    for folder in TEXT:
        for kind in ("py", "md"):
            paths += sorted((ROOT / folder).rglob(f"*.{kind}"))
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def token_ids(text: str, vocabulary: int) -> torch.Tensor:
    """Words, spaces and signs by how frequent they are, as (tokens,) int64; those that
    do not fit into the vocabulary share its last token.
    """
    pieces = re.findall(r"\w+|\s+|[^\w\s]", text)
    counts = Counter(pieces)
    ranked = sorted(counts, key=lambda piece: (-counts[piece], piece))
    ids = {piece: min(SPECIAL + i, vocabulary - 1) for i, piece in enumerate(ranked)}
    return torch.tensor([ids[piece] for piece in pieces])


def batches(ids: torch.Tensor, sizes: Sizes) -> Iterator[torch.Tensor]:
    """(batch, length) token ids for each step, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    places = torch.arange(sizes.length)
    for _ in range(sizes.steps):
        last = len(ids) - sizes.length
        starts = torch.randint(last, (sizes.batch, 1), generator=generator)
        yield ids[starts + places]


def train(
    shape: ModelShape, variant: Variant, ids: torch.Tensor, sizes: Sizes, device: str
) -> dict:
    """Train a new bfloat16 model of the shape with AdamW. ``tokens_per_s`` is a median over the
    steps, and has its range.
    """
    cuda = device == "cuda"
    gc.collect()  # the model of the run before
    torch.manual_seed(0)
    model = build(shape, sizes.layers, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=cuda)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    with variant.of(model):
        for batch in batches(ids, sizes):
            batch = batch.to(device)
            start = time.perf_counter()
            loss = model(batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())  # waits for all that runs on the device
            seconds.append(time.perf_counter() - start)
    tokens = sizes.batch * sizes.length
    speeds = [tokens / taken for taken in seconds[sizes.warm_up :]]
    made = {"tokens_per_s": statistics.median(speeds)}
    made |= {"tokens_per_s_min": min(speeds), "tokens_per_s_max": max(speeds)}
    if cuda:
        made["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return made | {"losses": losses}


def run(
    device: str,
    data: dict,
    rehearsal: bool = False,
    shapes: dict[str, ModelShape] = TRAINED,
    left: Callable[[], float] = lambda: math.inf,
    save: Callable[[], None] = lambda: None,
) -> list[str]:
    """Train each variant of `benchmarks.variants`, one after the other.

    Args:
        data: filled with ``sizes``, ``text``, ``models`` (by name and variant what
            `train` gives, and ``speedup``, ``memory_ratio`` and ``max_abs_dloss``
            beside the unpatched model), ``skipped`` and ``liger``.
        rehearsal: tiny models and few steps.
        shapes: by name; a LLaMA and a Qwen3, small enough for a GPU's minute.
        left: seconds that are left: a run that may take longer is skipped, and named.
        save: called after each run.

    Returns:
        What failed of this package, in words.
    """
    sizes = REHEARSED if rehearsal else Sizes()
    if rehearsal:
        kinds = {name: shape.model_type for name, shape in shapes.items()}
        shapes = {n: replace(TINY["tiny"], model_type=k) for n, k in kinds.items()}
    text = own_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    data |= {"rehearsal": rehearsal, "sizes": vars(sizes), "models": {}, "skipped": []}
    data["text"] = {"characters": len(text), "sha256": digest}
    failures, last = [], 0.0
    for name, shape in shapes.items():
        ids = token_ids(text, shape.vocabulary)
        variants, data["liger"] = timed_variants(shape.model_type)
        entries = data["models"][name] = {}
        for label, variant in variants.items():
            if left() < 1.2 * last:
                data["skipped"].append(f"{name}: {label}")
                continue
            start = time.perf_counter()
            try:
                entries[label] = train(shape, variant, ids, sizes, device)
            except Exception as error:
                if variant.liger is None:
                    raise
                entries[label] = {"error": in_words(error)}
            last = time.perf_counter() - start
            entries[label] |= _beside(entries[label], entries.get(UNPATCHED))
            save()
        failures += broken_together(name, entries)
    return failures


def _beside(entry: dict, unpatched: dict | None) -> dict:
    if unpatched is None or entry is unpatched or "error" in entry:
        return {}
    pairs = zip(entry["losses"], unpatched["losses"], strict=True)
    differences = [abs(ours - theirs) for ours, theirs in pairs]
    return ratios(entry, unpatched) | {"max_abs_dloss": max(differences)}
