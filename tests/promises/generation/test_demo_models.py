"""The embedded models: they load offline, are really trained, and are the models they
were when they are patched.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rmsnorm.demo import DEMO_MODELS, demo_path

# Written for this test, in no training text. Byte frequencies of the training text
# alone would give 3.02 nats.
UNSEEN = """\
If you open a file for reading and the file does not exist, an exception is raised. The function returns a list of
strings, one for each line of the file, and the optional argument gives the name of the encoding. When an object is
no longer needed, the method close() should be called, so that the resources used by the object are released.
"""
# measured when the models were committed, plus 0.05
UNSEEN_NATS_PER_BYTE = {"llama": 0.99, "qwen3": 0.99, "gpt2": 1.09}


@pytest.fixture(scope="module", params=DEMO_MODELS)
def demo(request):
    """(name, model in its stored dtype, tokenizer), read from the package alone."""
    path = demo_path(request.param)
    how = {"local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **how).eval()
    return request.param, model, AutoTokenizer.from_pretrained(path, **how)


def test_unknown_name_is_one_clear_line():
    message = r"^unknown demo model 'bert': choose one of llama, qwen3, gpt2$"
    with pytest.raises(ValueError, match=message):
        demo_path("bert")


def test_together_under_12_megabytes():
    files = [f for name in DEMO_MODELS for f in demo_path(name).iterdir()]
    assert sum(f.stat().st_size for f in files) < 12_000_000


@torch.no_grad()
def test_loss_on_unseen_text(demo):
    name, model, tokenizer = demo
    ids = tokenizer(UNSEEN, return_tensors="pt").input_ids
    loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < UNSEEN_NATS_PER_BYTE[name]


def test_the_tokenizer_reads_bytes(demo):
    _, _, tokenizer = demo
    text = "  two  spaces , naïve café — ½ · 한국어 日本語 🙂\r\n"
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.decode(ids) == text
    assert tokenizer(["ab", "a"], padding=True).input_ids == [[97, 98], [97, 256]]
    assert tokenizer.decode([97, 256], skip_special_tokens=True) == "a"
