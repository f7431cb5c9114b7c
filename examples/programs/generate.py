"""A program that knows nothing of hf-rmsnorm: hf-rmsnorm run examples/programs/generate.py"""

from transformers import pipeline

pipe = pipeline("text-generation", "hf_rmsnorm/demo/llama")
(said,) = pipe("The import statement", max_new_tokens=24, do_sample=False)
print(said["generated_text"])
