"""Print how large the mean of each norm's input is, relative to its root mean square.

LayerNorm subtracts this mean, and RMSNorm does not. Where it is 0 the two are the same
function, as after a conversion.

    python examples/norm_means.py demo:gpt2
"""

import sys
from functools import partial

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rmsnorm import patched
from hf_rmsnorm.demo import demo_path

TEXT = "The import statement binds a name. If it is bound already, the old value goes."


def norm_means(model, ids) -> dict[str, float]:
    """The median of |mean| / rms over the rows of each norm's input, by module path."""
    with patched(model) as report:
        paths = [norm.path for norm in report.swapped]
    means = {}

    def note(path, module, args, output):
        rows = args[0].double()
        rms = rows.square().mean(-1).sqrt()
        means[path] = (rows.mean(-1).abs() / rms).median().item()

    hooks = []
    for path in paths:
        norm = model.get_submodule(path)
        hooks.append(norm.register_forward_hook(partial(note, path)))
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return means


def main(name: str) -> None:
    """Load a language model of a folder, of the hub or of the demos, and print."""
    if name.startswith("demo:"):
        name = demo_path(name.removeprefix("demo:"))
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    for path, mean in norm_means(model, ids).items():
        print(f"{path:<48} {mean:.1e}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/norm_means.py MODEL")
    main(sys.argv[1])
