"""Each promise once, on the embedded models: what `scripts/versions.py` runs under
every version that is served.
"""

import copy
import json

import pytest
import torch
import transformers
from tiny_models import gradients, types

from hf_rmsnorm import (
    count_launches,
    patch_model,
    unpatch_model,
    use_backend,
    verify_equivalence,
)
from hf_rmsnorm.conversion import convert_checkpoint
from hf_rmsnorm.demo import DEMO_MODELS, demo_path

pytestmark = pytest.mark.full  # of the version that is here other tests speak
TEXT = "The function returns a list of strings"


def load(name):
    """In float32: two tokens of one logit in bfloat16 are a matter of the processor."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        demo_path(name), dtype=torch.float32
    ).eval()


def ids_of(text):
    return torch.tensor([list(text.encode())])  # the models read bytes


@pytest.mark.parametrize("name", DEMO_MODELS)
def test_patch_fuse_and_undo(name):
    model = load(name)
    before = model(ids_of(TEXT)).logits
    classes = types(model)
    report = patch_model(model, strict=True)
    assert not report.skipped
    for layer in report.layers:
        assert layer.fused
    with torch.no_grad(), use_backend("triton"), count_launches() as launches:
        after = model(ids_of(TEXT)).logits
    assert launches.total() > model.config.num_hidden_layers
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-3)
    assert unpatch_model(model) == len(report.swapped)
    assert types(model) == classes
    assert torch.equal(model(ids_of(TEXT)).logits, before)


@pytest.mark.parametrize("name", DEMO_MODELS)
def test_verify(name):
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_path(name))
    assert tokenizer(TEXT).input_ids == ids_of(TEXT)[0].tolist()
    with use_backend("triton"):
        result = verify_equivalence(
            load(name), inputs=ids_of(TEXT[:16]), max_new_tokens=2, backward=True
        )
    assert result.passed, result


def test_generate():
    model = load("llama")
    expected = model.generate(ids_of(TEXT), max_new_tokens=8, do_sample=False)
    patch_model(model)
    with use_backend("triton"):
        assert torch.equal(
            model.generate(ids_of(TEXT), max_new_tokens=8, do_sample=False), expected
        )


def test_train(tmp_path):
    """Steps of the Trainer on a patched model leave the weights that they leave on an
    unpatched one.
    """
    plain = load("qwen3")
    patched = copy.deepcopy(plain)
    finished = []
    patch_model(patched)
    data = [{"input_ids": ids_of(TEXT)[0], "labels": ids_of(TEXT)[0]}] * 2
    for model in (plain, patched):
        options = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            learning_rate=1e-3,
            logging_strategy="no",
        )
        with (
            use_backend("triton" if model is patched else "reference"),
            count_launches() as launches,
        ):
            transformers.Trainer(model, options, train_dataset=data).train()
        assert bool(launches) == (model is patched)
        finished.append(dict(model.named_parameters()))
    torch.testing.assert_close(finished[1], finished[0], rtol=1e-3, atol=1e-4)


def test_compile():
    """A step of a patched model that is compiled is one graph, in which the kernels are
    launched.
    """
    ids = ids_of(TEXT[:16])
    model = load("llama")
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    patch_model(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with use_backend("triton"), count_launches() as launches:
        after = compiled(ids, labels=ids, use_cache=False).loss
        after.backward()
    assert launches.total() > model.config.num_hidden_layers
    torch.testing.assert_close(after, loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradients(model), expected, rtol=1e-3, atol=1e-4)


def test_convert(tmp_path):
    convert_checkpoint(demo_path("gpt2"), tmp_path / "rms")
    expected = load("gpt2")(ids_of(TEXT)).logits
    load_from = transformers.AutoModelForCausalLM.from_pretrained
    converted = load_from(tmp_path / "rms").eval()
    logits = converted(ids_of(TEXT)).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    assert patch_model(converted).swapped
    logits = converted(ids_of(TEXT)).logits
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", DEMO_MODELS)
def test_every_version_has_the_class_that_a_tokenizer_names(name):
    """Transformers 5 saves another name, which Transformers 4 does not have."""
    config = json.loads(
        (demo_path(name) / "tokenizer_config.json").read_text(encoding="utf-8")
    )
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
