"""Asks `transformers serve` on port 8000, or on the one that is named, for a text."""

import sys

from openai import OpenAI

port = sys.argv[1] if len(sys.argv) > 1 else "8000"
client = OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none")
said = client.completions.create(
    model="hf_rmsnorm/demo/qwen3",
    prompt="The import statement",
    max_tokens=24,
    temperature=0,
)
print(said.choices[0].text)
