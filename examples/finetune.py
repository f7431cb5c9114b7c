"""Fine-tune a model with fused norms, or without: the losses are the same.

    accelerate launch examples/finetune.py --max-steps 20
    accelerate launch examples/finetune.py --max-steps 20 --no-patch

The text is Python's own help topics. Writes the model and ``losses.json`` to ``--output-dir``.
"""

import argparse
import json
import pydoc_data.topics
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rmsnorm import patch_model, use_backend
from hf_rmsnorm.demo import demo_path

BLOCK = 128  # tokens per example


def read_examples(tokenizer) -> torch.Tensor:
    """The help topics as token ids, (examples, BLOCK)."""
    text = "\n\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))[:200_000]
    ids = tokenizer(text, return_tensors="pt", truncation=False, verbose=False).input_ids[0]
    return ids[: len(ids) // BLOCK * BLOCK].view(-1, BLOCK)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo_path("llama")), help="a local folder or a hub id")
    parser.add_argument("--patch", action=argparse.BooleanOptionalAction, default=True, help="fuse the norms")
    parser.add_argument("--backend", default="auto", help="what computes them: auto, triton or reference")
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--output-dir", type=Path, default=Path("finetuned"))
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    examples = read_examples(AutoTokenizer.from_pretrained(args.model))
    if args.patch:
        accelerator.print(patch_model(model))  # in place: the optimizer above stays valid

    loader = DataLoader(examples, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model.train(), optimizer, loader)
    losses = []
    with use_backend(args.backend):
        while len(losses) < args.max_steps:
            for batch in loader:
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach()).mean().item())
                accelerator.print(f"step {len(losses):4d}  loss {losses[-1]:.6f}")
                if len(losses) == args.max_steps:
                    break

    if accelerator.is_main_process:  # an ordinary checkpoint: patched or not, the same keys and class names
        accelerator.unwrap_model(model).save_pretrained(args.output_dir)
        (args.output_dir / "losses.json").write_text(json.dumps({"losses": losses}) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
