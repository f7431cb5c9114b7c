"""Convert a LayerNorm model to RMSNorm, and look at the means that make the difference.

    python docs/tutorials/convert_and_look.py [FOLDER]

It needs no GPU and no network, and takes about half a minute. With FOLDER the converted checkpoint is kept there.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_rmsnorm import convert_checkpoint, inspect_norms, patch_model, plan_conversion
from hf_rmsnorm.demo import demo_path

logging.disable_progress_bar()
TEXT = "The import statement binds a name. If the name is bound already, the old value is lost. " * 3
tokenizer = AutoTokenizer.from_pretrained(demo_path("gpt2"))
ids = tokenizer(TEXT, return_tensors="pt").input_ids


def show(found):
    for norm in (found.norms[0], found.norms[1], found.norms[-1]):
        print(f"  {norm.path:<22} {'LayerNorm' if norm.centered else 'RMSNorm':<10} |mean| / RMS {norm.median:.0e}")
    print(f"  perplexity {found.perplexity:.4f}")


# 1. A LayerNorm takes off the mean of its input; an RMSNorm does not. Here is how large that mean is.
model = AutoModelForCausalLM.from_pretrained(demo_path("gpt2"), dtype=torch.float32).eval()
before = inspect_norms(model, ids)
print("GPT-2 as it is")
show(before)

# 2. So a naive swap, the same weights in RMSNorms, is another model.
print(f"\nevery LayerNorm swapped for an RMSNorm: perplexity {before.naive.perplexity:.4f}")

# 3. The plan: which tensors write to the residual stream, found by arithmetic and proven in float64. No weight is read.
planned = plan_conversion(demo_path("gpt2"))
print(f"\n{str(planned).splitlines()[0]}")  # print(planned) lists every tensor and norm

# 4. The conversion, verified before its folder appears. The source is only read.
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "gpt2-rms"
done = convert_checkpoint(demo_path("gpt2"), folder, planned=planned)
print(f"converted: {'PASS' if done.verification.passed else 'FAIL'}")

# 5. The result is a plain GPT-2 checkpoint. Its norms' inputs have no mean, and it says the same.
converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
print("\nGPT-2 converted, loaded without this package")
show(inspect_norms(converted, ids))

# 6. With this package the norms run as RMSNorm, because the checkpoint records that they may.
report = patch_model(converted)
print(f"\npatched: {len(report.swapped)} x {report.swapped[0].formula}")
with torch.no_grad():
    logits, expected = converted(ids).logits, model(ids).logits
print(f"the likeliest next byte is the original's in {(logits.argmax(-1) == expected.argmax(-1)).float().mean():.0%}")
