"""The three small trained models that ship with the package.

Each folder here is an ordinary checkpoint (``config.json``,
``model.safetensors``, tokenizer) of about one million parameters, trained from nothing
by ``scripts/train_demo.py``; its ``training.json`` says how.
"""

from pathlib import Path

DEMO_MODELS = ("llama", "qwen3", "gpt2")


def demo_path(name: str) -> Path:
    """Return the folder of an embedded model, ready for ``from_pretrained``.

    Args:
        name: one of :data:`DEMO_MODELS`.

    Raises:
        ValueError: ``name`` is not an embedded model.
    """
    if name not in DEMO_MODELS:
        raise ValueError(
            f"unknown demo model {name!r}: choose one of {', '.join(DEMO_MODELS)}"
        )
    return Path(__file__).resolve().parent / name
