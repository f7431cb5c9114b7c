"""The tables of the documentation, each made from a committed result and placed between
two comments of a page; and the pages on the Python interface and on changes, made from
the source and CHANGELOG.md.

    python -m scripts.tables            # says which tables differ from the results
    python -m scripts.tables --write    # writes them into the pages

A page holds ``<!-- table: NAME -->`` and ``<!-- end -->``. To add a table, write a function that returns its lines, and
name it in `TABLES`.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import layer_table
from benchmarks.tables import markdown

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACE = re.compile(r"(<!-- table: ([\w ]+) -->).*?(<!-- end -->)", re.DOTALL)
COVERAGE = "coverage-5.23.0.json"


def result(name: str):
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def rows(head: str, cells: Iterable[tuple]) -> list[str]:
    """The lines of a table; `head` has the names of its columns with ``|`` between."""
    names = [name.strip() for name in head.split("|")]
    lines = [[str(cell).replace("|", "/") for cell in line] for line in cells]
    return markdown(names, lines)


def memory() -> list[str]:
    """Peak memory of a training step of whole models on a GPU."""
    names = ("unpatched", "patch_model", "liger")
    sections = result(layer_table.GPU)["sections"]
    cells = []
    for section, model in (("llama", "LLaMA"), ("qwen3", "Qwen3")):
        phase = sections[section]["data"]["phases"]["train"]
        cells.append((model, *(f"{phase[name]['peak_gb']:.1f}" for name in names)))
    step = "peak GB of a training step, H100"
    return rows(f"{step} | Hugging Face | hf-rmsnorm | Liger's norms", cells)


def kernels() -> list[str]:
    """Microseconds of single kernels on each GPU, forward and backward together."""
    cases = {
        "RMSNorm 8192x4096": "RMSNorm, 8,192 x 4,096",
        "add + RMSNorm 8192x4096": "residual sum + RMSNorm, 8,192 x 4,096",
        "q/k norm + rotary 2x4096x32x8x128": "q/k norm + rotary, Qwen3-8B, 8,192 tokens",
        "q/k norm 2x4096x32x8x128": "q/k norm without rotary",
        "LayerNorm 8192x4096": "LayerNorm, 8,192 x 4,096",
        "RMSNorm 1x4096": "RMSNorm, 1 x 4,096",
    }

    names = ("hf_rmsnorm", "hf_eager", "F.rms_norm", "torch.compile", "liger")
    cells = []
    for name, words in cases.items():
        for device, sections in layer_table.gpu_results():
            measured = sections["kernels"]["cases"]
            for case in (case for case in measured if case["case"] == name):
                found = [case["implementations"].get(name) for name in names]
                us = [
                    f"{one['forward+backward']['us']:,.1f}" if one else ""
                    for one in found
                ]
                cells.append((f"{words}, {device}", *us))
    head = "bfloat16 | hf-rmsnorm | Hugging Face | F.rms_norm | torch.compile | Liger"
    return rows(head, cells)


def host() -> list[str]:
    """Microseconds that a call keeps the host busy: medians, over all results."""
    found = [s["host"]["cases"] for _, s in layer_table.gpu_results() if "host" in s]
    names = {"hf-rmsnorm": "hf_rmsnorm", "Hugging Face": "hf_eager"}
    names |= {"Liger": "liger", "`F.rms_norm`": "F.rms_norm"}
    cells = []
    for words, name in names.items():
        row = [words]
        for case in ("RMSNorm 1x1x64", "add + RMSNorm 1x1x64"):
            entries = [cases[case][name] for cases in found if name in cases[case]]
            for mode in ("inference", "forward+backward"):
                medians = [entry[mode]["us"] for entry in entries]
                row.append(layer_table.range_words(medians, 1))
        cells.append(row)
    head = "| RMSNorm: inference | with backward | residual sum + RMSNorm: inference | with backward"
    return rows(head, cells)


def cpu() -> list[str]:
    """CPU time of a decoded token where no kernel serves, over the unpatched model's."""
    models = result("cpu.json")["models"]
    cells = [
        (name, f"{m['ratio'] - 1:+.1%}", f"{m['ratio by chance'] - 1:+.1%}")
        for name, m in models.items()
    ]
    return rows("model | patched | two unpatched copies", cells)


def versions() -> list[str]:
    names = ("python", "transformers", "torch", "triton")
    cells = []
    for row in result("versions.json"):
        had = [row["versions"][name] for name in names]
        ran = [row["passed"], row.get("bits", ""), row.get("launches", "")]
        ratios = ["", ""]
        if host := row.get("host"):
            ratios = [f"{host[what]['ratio']:.2f}" for what in ("norm", "layer")]
        failed = ", ".join(row["failures"]) or "none"
        cells.append([*had, *ran, *ratios, failed])
    head = "Python | Transformers | torch | Triton | promises | bits | launches | norm | layer | failed"
    return rows(head, cells)


def trainers() -> list[str]:
    cells = []
    for row in result("trainers.json"):
        _, trainer, version = row["row"].split("/")
        cell = [f"{trainer} {version}"]
        cell += [row["versions"][name] for name in ("transformers", "torch")]
        cell.append(row.get("swapped", "").partition(",")[0])
        for run in ("losses", "without"):
            cell.append(", ".join(f"{loss:.4f}" for loss in row.get(run, ())))
        cells.append([*cell, ", ".join(row["failures"]) or "none"])
    head = (
        "trainer | Transformers | torch | stderr | losses, patched | unpatched | failed"
    )
    return rows(head, cells)


def models() -> list[str]:
    keys = ("swapped", "skipped", "sums", "pairs", "verified")
    cells = []
    for name, row in result("real_configs.json").items():
        conversion = row["verdict"].removesuffix(" become RMSNorm")
        if "post-norm" in row["reason"]:
            conversion = "refused: post-norm"
        cells.append((name, *(row.get(key, "") for key in keys), conversion))
    head = "model | norms swapped | skipped | sums fused | q/k pairs fused | narrow copy | conversion"
    return rows(head, cells)


def coverage() -> list[str]:
    """How many norms of all types of Transformers are swapped, and which are skipped."""
    document = result(COVERAGE)
    columns = {
        "types": "types", "built": "built", "run": "run",
        "norms swapped": "norms_swapped", "skipped": "norms_left_alone",
        "wrong results": "with_wrong_results",
        "with sums fused": "types_with_fused_sums",
        "with q/k norms fused": "types_with_fused_pairs",
    }  # fmt: skip
    cells = []
    mappings = {"causal": "causal language models", "base": "base models"}
    for mapping, words in mappings.items():
        totals = document["mappings"][mapping]["totals"]
        counts = [totals[key] for key in columns.values()]
        cells.append((words, *counts))
    version = document["versions"]["transformers"]
    head = " | ".join([f"Transformers {version}", *columns])
    return [*rows(head, cells), "", *rows("skipped | because", _skipped(document))]


def rotations() -> list[str]:
    """In how many causal types of Transformers rotary embeddings are fused, or why not."""
    document = result(COVERAGE)
    types = defaultdict(list)
    for record in document["mappings"]["causal"]["types"]:
        for run in record["runs"][:1]:
            if rotation := run.get("fusion", {}).get("rotation"):
                types[rotation].append(f"`{record['type']}`")
    fused = types.pop("fused")
    cells = [("one launch, alone or with q and k norms", len(fused), "")]
    for reason, names in sorted(types.items()):
        cells.append((reason, len(names), ", ".join(names)))
    return rows("rotary embedding | causal types | which", cells)


def _skipped(document: dict) -> list[tuple[str, str]]:
    """(classes, reason), the most classes first."""
    classes = defaultdict(set)
    for mapping in document["mappings"].values():
        for group in mapping["left_alone"]:
            reason = textwrap.shorten(group["reason"], 110, placeholder=" ...")
            classes[reason].add(f"`{group['class']}`")
    ordered = sorted(classes.items(), key=lambda pair: (-len(pair[1]), pair[0]))
    return [(", ".join(sorted(names)), reason) for reason, names in ordered]


def diffusers() -> list[str]:
    """What is fused in each transformer class of diffusers."""
    from scripts.coverage.diffusers import page_table  # which loads torch

    return page_table(result("diffusers-0.42.1.json"))


def regimes() -> list[str]:
    """Which pieces run as kernels in training, offloading, ..., and why others do not."""
    from scripts.coverage.regimes import page_tables  # which loads torch

    return page_tables(result("regimes.json"))


def conversions() -> list[str]:
    """How many types of Transformers convert."""
    document = result("convert-5.23.0.json")
    counts = document["summary"]
    kinds = {
        "convert in full": "converted", "convert in part": "partly",
        "are refused, with the reason": "refused", "use RMSNorm already": "RMSNorm",
        "have no LayerNorm": "no LayerNorm", "were not run": "not run",
    }  # fmt: skip
    head = f"types of Transformers {document['versions']['transformers']} that | number"
    return rows(head, [(words, counts[kind]) for words, kind in kinds.items()])


def interface() -> list[str]:
    """Signatures and docstrings of what users import."""
    from scripts.interface import page  # which loads torch

    return page()


def changes() -> list[str]:
    """CHANGELOG.md below its title, for a page among the others."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return text.splitlines()[2:]


def minilm() -> list[str]:
    measured = result("minilm.json")
    cells = []
    for key, words in (("naive", "a naive swap"), ("fit", "the least-squares fit")):
        trained = measured[f"{key} distilled"]
        before = measured[key]["rms_norm"]["cosine_mean"]
        after = trained["rms_norm"]["cosine_mean"]
        cells.append((words, f"{before:.6f}", f"{after:.6f}, {trained['steps']} steps"))
    return rows("| at once | after distilling", cells)


TABLES: dict[str, Callable[[], list[str]]] = {
    "memory": memory, "kernels": kernels, "host": host, "cpu": cpu,
    "versions": versions, "trainers": trainers, "models": models, "coverage": coverage, "rotations": rotations,
    "conversions": conversions, "diffusers": diffusers, "minilm": minilm,
    "regimes": regimes, "interface": interface, "changes": changes,
    **layer_table.TABLES,
}  # fmt: skip


def renewed(text: str) -> str:
    """A page with every table as the results have it now."""

    def table(place: re.Match) -> str:
        return "\n".join([place[1], *TABLES[place[2]](), place[3]])

    return PLACE.sub(table, text)


def main(argv: list[str]) -> int:
    """Check, or write; returns 1 where a page has another table than the results."""
    code = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = renewed(text)
        if "--write" in argv:
            page.write_text(new, encoding="utf-8")
        elif new != text:
            print(f"{page.name} differs: run python -m scripts.tables --write")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
