"""Patch a language model, prove that it computes the same, break it on purpose, and take the patch off again.

    python docs/tutorials/patch_and_prove.py

It needs no GPU and no network, and takes about half a minute.
"""

import os

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":  # run the kernels in Triton's interpreter, exact and slow; Triton reads this when it is imported
    os.environ["TRITON_INTERPRET"] = "1"

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_rmsnorm import count_launches, patch_model, unpatch_model, verify_equivalence
from hf_rmsnorm.demo import demo_path

logging.disable_progress_bar()

# 1. A model, as always. This one is part of the package: a LLaMA of a million parameters that reads bytes.
tokenizer = AutoTokenizer.from_pretrained(demo_path("llama"))
model = AutoModelForCausalLM.from_pretrained(demo_path("llama"), dtype=torch.bfloat16).to(device).eval()
ids = tokenizer("The import statement", return_tensors="pt").input_ids.to(device)
with torch.no_grad():
    before = model(ids).logits

# 2. The patch. The report names each formula that was recognised and the modules that compute it.
print(patch_model(model))

# 3. The norms launch kernels now, and the logits are the same bits.
with torch.no_grad(), count_launches() as launches:
    after = model(ids).logits
print(f"\n{launches.total()} launches; {(after == before).float().mean():.0%} of the logits are equal to the bit")

# 4. The module is still the same module: a subclass of its class, with the same parameters.
norm = model.model.norm
names = [name for name, _ in norm.named_parameters()]
print(f"{type(norm).__name__}, a subclass of {type(norm).__mro__[1].__name__}, with {names}")

# 5. The proof: logits against float64, each norm against its original, and greedy text.
print(f"\n{verify_equivalence(model, inputs=ids, max_new_tokens=4, backward=True)}")

# 6. A proof is worth something if it can fail. torch's RMSNorm rounds once, at the end; LLaMA's rounds twice.
#    The text and the logits hide that. The comparison norm by norm does not.
unpatch_model(model)
broken = AutoModelForCausalLM.from_pretrained(demo_path("llama"), dtype=torch.bfloat16).to(device).eval()
broken.model.norm = torch.nn.RMSNorm(128, eps=1e-6, dtype=torch.bfloat16, device=device)
broken.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach().clone())
verdict = verify_equivalence(model, broken, inputs=ids, max_new_tokens=4)
(check,) = [check for check in verdict.norms if check.path == "model.norm"]
print(f"\nWith torch.nn.RMSNorm for the last norm: {'PASS' if verdict.passed else 'FAIL'}")
print(f"logits within the noise: {verdict.noise_floor.passed}; greedy text equal: {verdict.greedy.passed}")
print(f"model.norm: {check.differing} of {check.elements} elements differ, {check.allowed} may")

# 7. Without the patch the model is what it was.
with torch.no_grad():
    print(f"\nunpatched, and equal again: {torch.equal(model(ids).logits, before)}")
