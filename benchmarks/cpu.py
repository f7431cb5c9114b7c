"""What a patch costs where no kernel can serve: CPU time of a decoded token, patched
and not, in turn.

The models run on the CPU in one thread, without Triton's interpreter. A second copy of
the unpatched model takes turns with the two: what lies between it and the first is what
chance does.
"""

from __future__ import annotations

import copy
import os
import statistics
from collections.abc import Callable
from pathlib import Path

from benchmarks.compact import write_result
from benchmarks.tables import columns
from hf_rmsnorm.cli.common import CliError, Result, add_count

PLAIN, PATCHED, AGAIN = "unpatched", "patched", "unpatched again"
RATIOS = ("ratio", "ratio of least", "ratio by chance")
PROMPT, TOKENS = 16, 8  # decoded in a turn
# Of about 90 million parameters.
LLAMA = {"hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 16}
LLAMA |= {"num_attention_heads": 10, "num_key_value_heads": 10, "vocab_size": 8192}


def add_arguments(parser) -> None:
    what = "turns of the demo, a fifth of that of the LLaMA"
    add_count(parser, "--turns", 200, what, least=5)
    help = "also write the JSON there"
    parser.add_argument("--out", metavar="FILE", type=Path, help=help)


def run(args) -> Result:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from benchmarks.environment import environment
    from hf_rmsnorm.demo import demo_path
    from hf_rmsnorm.ops.backend import runs_on

    if runs_on("cpu")["backend"] != "original":
        raise CliError(
            "a CPU that kernels serve is not what this measures: unset TRITON_INTERPRET"
        )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    load = AutoModelForCausalLM.from_pretrained
    models = {
        "demo:qwen3": (load(demo_path("qwen3"), dtype=torch.float32), args.turns),
        "LLaMA of 90 M": (LlamaForCausalLM(LlamaConfig(**LLAMA)), args.turns // 5),
    }
    data = {"bench": "cpu", **environment(False), "cores": os.cpu_count()}
    data |= {"load": os.getloadavg(), "models": {}}
    rows = [("us", PLAIN, PATCHED, *RATIOS)]
    for name, (model, turns) in models.items():
        found = data["models"][name] = measure(model.eval(), turns)
        ratios = [f"{found[key]:.3f}" for key in RATIOS]
        rows.append((name, found[PLAIN]["us"], found[PATCHED]["us"], *ratios))
    if args.out:
        write_result(args.out, data)
    return Result(data, "\n".join(columns(rows)))


def measure(model, turns: int) -> dict:
    """Microseconds of CPU time for a token: median and least by kind, and the medians
    of the turns' own ratios.
    """
    from benchmarks.host import median_and_least, timed_in_turns
    from hf_rmsnorm import patch_model

    # Copies of the modules with the same weights, so that they lie where they lie for
    # all.
    models = {
        kind: copy.deepcopy(model, {id(p): p for p in model.parameters()})
        for kind in (PLAIN, PATCHED, AGAIN)
    }
    patch_model(models[PATCHED])
    calls = {kind: _decoding(each) for kind, each in models.items()}
    spent = timed_in_turns(calls, turns, "cpu", TOKENS)

    def ratio(kind: str) -> float:
        pairs = zip(spent[kind], spent[PLAIN], strict=True)
        return statistics.median(a / b for a, b in pairs)

    return median_and_least(spent) | {
        "turns": turns,
        "parameters": sum(p.numel() for p in model.parameters()),
        "ratio": ratio(PATCHED),
        "ratio of least": min(spent[PATCHED]) / min(spent[PLAIN]),
        "ratio by chance": ratio(AGAIN),
    }


def _decoding(model) -> Callable[[], None]:
    """Decodes a token behind a prompt, the same one each time."""
    import torch

    with torch.no_grad():
        cache = model(torch.arange(3, 3 + PROMPT)[None], use_cache=True).past_key_values
    token = torch.tensor([[5]])

    @torch.no_grad()
    def decode() -> None:
        model(token, past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return decode
