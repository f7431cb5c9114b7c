"""Patch a language model, and see that it says the same as before.

    python examples/generate.py --prompt "The import statement"

Prints what was patched, the text before and after, and how equal the logits are.
Without a GPU the Triton kernels run in Triton's interpreter, which is exact and slow;
with one, they are compiled for it.
"""

import argparse
import os

import torch

HAS_GPU = torch.accelerator.is_available()
if not HAS_GPU:
    # triton reads this when it is imported, by the next lines
    os.environ.setdefault("TRITON_INTERPRET", "1")

from refusals import model_source
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_rmsnorm import patched, verify_equivalence
from hf_rmsnorm.ops import runs_on


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    told = "a local folder, a hub id, or demo:llama, demo:qwen3, demo:gpt2"
    parser.add_argument("--model", type=model_source, default="demo:llama", help=told)
    parser.add_argument("--prompt", default="The following table")
    count = 100 if HAS_GPU else 20  # each token takes a second in the interpreter
    parser.add_argument("--max-new-tokens", type=int, default=count)
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        help="0 takes the likeliest token each time",
    )
    args = parser.parse_args()
    logging.disable_progress_bar()

    device = torch.accelerator.current_accelerator() if HAS_GPU else torch.device("cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = (
        AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(device).eval()
    )
    inputs = tokenizer(args.prompt, return_tensors="pt").to(device)

    sampling = (
        {"do_sample": True, "temperature": args.temperature}
        if args.temperature
        else {"do_sample": False}
    )

    def generate() -> list[int]:
        # the same draws both times: equal logits give equal tokens
        torch.manual_seed(0)
        return model.generate(**inputs, max_new_tokens=args.max_new_tokens, **sampling)[
            0
        ].tolist()

    before = generate()
    with patched(model) as report:  # or patch_model(model), to keep it patched
        after = generate()

    print(report)
    print(
        f"\n--- before the patch\n{tokenizer.decode(before, skip_special_tokens=True)}"
    )
    print(f"\n--- after the patch\n{tokenizer.decode(after, skip_special_tokens=True)}")
    print(
        f"\n--- equivalence: {'the tokens are equal' if before == after else 'THE TOKENS DIFFER'}"
    )
    verdict = verify_equivalence(model, inputs=torch.tensor([before]), max_new_tokens=4)
    print(verdict)
    where = runs_on(device)
    print(f"\nThe norms ran on {device}: {where['reason']}.")
    if not HAS_GPU and where["backend"] == "triton":
        print(
            "This script asks for the interpreter where there is no GPU. Elsewhere a CPU runs plain PyTorch, and an "
            "NVIDIA GPU the fused kernels."
        )
    return 0 if before == after and verdict.verdict != "FAIL" else 1


if __name__ == "__main__":
    raise SystemExit(main())
