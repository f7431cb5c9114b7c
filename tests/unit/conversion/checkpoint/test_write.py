"""A streamed conversion gives the tensors of one in memory, and every file that belongs
to the checkpoint.
"""

import fcntl
import json
import os

import pytest
import tiny_models
import torch
from checkpoints import (
    ADDED,
    CONFIG,
    INDEX,
    assert_same,
    contents,
    in_memory,
    load,
    tiny,
    trained,
    write_checkpoint,
    write_plan,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_rmsnorm import convert_checkpoint, patch_model, plan_conversion
from hf_rmsnorm.conversion import CentringPlan
from hf_rmsnorm.conversion.plan import Centre, Copy


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_equal_to_the_conversion_in_memory(tmp_path, dtype):
    shards, plan = tiny(dtype)
    src = write_checkpoint(tmp_path / "src", shards, metadata={"format": "pt"})
    write_plan(plan, src, tmp_path / "dst")
    assert_same(load(tmp_path / "dst"), in_memory(plan, load(src)))


@pytest.fixture
def src(tmp_path):
    metadata = {"format": "pt", "who": "\u00e9"}
    return write_checkpoint(tmp_path / "src", tiny()[0], metadata=metadata)


def read(path):
    return json.loads(path.read_text())


def test_every_file_of_the_checkpoint(src, tmp_path):
    (src / "tokenizer.json").write_bytes(b'{"a": 1}\r\n')
    (src / "1_Pooling").mkdir()
    (src / "1_Pooling" / "config.json").write_text("{}")
    before = contents(src)
    dst = tmp_path / "dst"
    write_plan(tiny()[1], src, dst)
    assert contents(src) == before and sorted(tmp_path.iterdir()) == [dst, src]
    after = contents(dst)
    assert after.keys() == before.keys() | ADDED
    for name in ("tokenizer.json", "1_Pooling/config.json"):
        assert after[name] == before[name]
    config = read(dst / "config.json")
    changes = {"tie_word_embeddings": False, "hf_rmsnorm": {"version": 1}}
    assert config == CONFIG | changes and list(config) == [*CONFIG, "hf_rmsnorm"]
    for path in src.glob("model-*"):
        with safe_open(dst / path.name, "pt") as file:
            metadata = file.metadata()
            made = metadata.pop("hf_rmsnorm")
            assert "converted_by" in made
            assert metadata == {"format": "pt", "who": "\u00e9"}


def test_the_index_counts_a_new_tensor(src, tmp_path):
    write_plan(tiny()[1], src, tmp_path / "dst")
    new, old = read(tmp_path / "dst" / INDEX), read(src / INDEX)
    head = load(src)["wte.weight"]
    old["metadata"]["total_size"] += head.nbytes
    old["metadata"]["total_parameters"] += head.numel()
    old["weight_map"]["lm_head.weight"] = old["weight_map"]["wte.weight"]
    assert new == old


def test_progress_and_summary_count_what_is_written(src, tmp_path):
    seen = []
    result = write_plan(
        tiny()[1], src, tmp_path / "dst", progress=lambda *done: seen.append(done)
    )
    tensors = load(tmp_path / "dst")
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert (result.tensors, result.bytes) == (len(tensors), size)
    assert seen == sorted(seen) and seen[-1] == (len(tensors), size, size)
    assert result.resumed == 0 and result.unused == ()


def test_shards_in_a_subfolder_stay_there(src, tmp_path):
    """Transformers loads them from where the index says that they are."""
    expected = in_memory(tiny()[1], load(src))
    index = read(src / INDEX)
    for key, name in index["weight_map"].items():
        index["weight_map"][key] = f"parts/{name}"
    (src / INDEX).write_text(json.dumps(index))
    (src / "parts").mkdir()
    for path in src.glob("model-*"):
        path.rename(src / "parts" / path.name)
    write_plan(tiny()[1], src, tmp_path / "dst")
    files = set(read(tmp_path / "dst" / INDEX)["weight_map"].values())
    assert files == set(index["weight_map"].values())
    assert_same(load(tmp_path / "dst" / "parts"), expected)


OLD = "weights of the model before the conversion"
NOT_COPIED = {
    "pytorch_model.bin": OLD,
    "tf_model.h5": OLD,
    "model.fp16.safetensors": OLD,
    "consolidated.safetensors": OLD,
    "onnx/model.onnx": OLD,
    "checkpoint-5/model.safetensors": OLD,
    "training_args.bin": "state of the training before the conversion",
    "checkpoint-5/optimizer.pt": "state of the training before the conversion",
    "adapter_model.safetensors": "an adapter of the model before the conversion: merge it before converting",
    "voices.pt": "may hold weights of the model before the conversion: copy it by hand if it does not",
    ".cache": "not of the model",
    "loop": "a link to a folder that is in the checkpoint already",
}


def test_what_is_not_copied_is_named_with_its_reason(src, tmp_path):
    names = {path.name for path in src.iterdir()}
    for name in (*NOT_COPIED, "2_Dense/pytorch_model.bin", ".cache/x"):
        path = src / name
        path.parent.mkdir(exist_ok=True)
        if name not in (".cache", "loop"):
            path.write_bytes(b"old")
    (src / "loop").symlink_to(src)
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "config.json").write_text("{}")
    (src / "3_Linked").symlink_to(tmp_path / "elsewhere")
    result = write_plan(tiny()[1], src, tmp_path / "dst")
    assert result.not_copied == NOT_COPIED
    carried = {"2_Dense/pytorch_model.bin", "3_Linked/deep/config.json"}
    assert set(contents(tmp_path / "dst")) == names | carried | ADDED
    training = "checkpoint-5/optimizer.pt, training_args.bin"
    assert f"not copied: {training} (state of the training" in str(result)


def test_links_of_a_download_cache_are_followed(src, tmp_path):
    blobs = src.rename(tmp_path / "blobs")
    src.mkdir()
    for path in blobs.iterdir():
        (src / path.name).symlink_to(path)
    write_plan(tiny()[1], src, tmp_path / "dst")
    assert not any(path.is_symlink() for path in (tmp_path / "dst").iterdir())
    assert_same(load(tmp_path / "dst"), in_memory(tiny()[1], load(blobs)))


def test_a_header_keeps_no_stale_tie(tmp_path):
    shards, plan = tiny()
    ties = {"lm_head.weight": "wte.weight", "other.weight": "wte.weight"}
    src = write_checkpoint(tmp_path / "src", shards, metadata=ties)
    write_plan(plan, src, tmp_path / "dst")
    for path in (tmp_path / "dst").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata().keys() == {"format", "other.weight", "hf_rmsnorm"}


def test_tensors_of_every_dtype_keep_their_bytes(tmp_path):
    names = (
        "float8_e4m3fn",
        "float8_e5m2",
        "int64",
        "int8",
        "uint8",
        "bool",
        "complex64",
    )
    tensors = {"w": trained(2, 4)}
    for name in names:
        tensors[name] = torch.arange(6).view(2, 3).to(getattr(torch, name))
    src = write_checkpoint(tmp_path / "src", [tensors])
    plan = CentringPlan((Centre("w", 1, 4),), (Copy("again", "int8"),))
    write_plan(plan, src, tmp_path / "dst")
    after = load(tmp_path / "dst")
    tensors["again"] = tensors["int8"]
    for name in (*names, "again"):
        assert after[name].dtype == tensors[name].dtype
        kept = after[name].view(torch.uint8), tensors[name].view(torch.uint8)
        assert torch.equal(*kept), name


@pytest.mark.parametrize("zipped", [False, True])
def test_allowed_pickles_become_safetensors(src, tmp_path, zipped):
    shards, plan = tiny()
    # stored transposed
    shards[1]["h.0.out.weight"] = shards[1]["h.0.out.weight"].t().contiguous().t()
    index = (src / INDEX).read_text().replace("safetensors", "bin")
    index = index.replace("model-", "pytorch_model-")
    (src / "pytorch_model.bin.index.json").write_text(index)
    for path in src.glob("model*"):
        path.unlink()
    tensors = {}
    for number, shard in enumerate(shards, 1):
        path = src / f"pytorch_model-0000{number}-of-00002.bin"
        torch.save(shard, path, _use_new_zipfile_serialization=zipped)
        tensors |= shard
    dst = tmp_path / "dst"
    write_plan(plan, src, dst, allow_pickle=True)
    assert_same(load(dst), in_memory(plan, tensors))
    weights = read(dst / INDEX)["weight_map"]
    assert weights["h.0.scale"] == "model-00002-of-00002.safetensors"
    assert set(weights) == {*tensors, "lm_head.weight"} and not list(dst.glob("*.bin*"))
    with safe_open(next(dst.glob("*.safetensors")), "pt") as file:
        assert file.metadata()["format"] == "pt"  # or Transformers does not load it


@pytest.fixture
def gpt2(tmp_path):
    model = tiny_models.build("gpt2")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1 + 0.05)
    model.save_pretrained(tmp_path / "src")
    return tmp_path / "src"


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_tensors_narrower_than_the_config_says_are_written_as_it_says(
    gpt2, tmp_path, stored
):
    """Rounded to their own dtype they would have a mean for whoever loads them in the
    config's.
    """
    tensors = load_file(gpt2 / "model.safetensors")
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(stored)
    save_file(tensors, gpt2 / "model.safetensors", metadata={"format": "pt"})
    planned = plan_conversion(gpt2)
    name = str(stored).removeprefix("torch.")
    said = f"config.json says float32 and tensors are stored in {name}: those that are changed are written in float32"
    assert said in str(planned) and f"to keep {name}, set dtype to it" in str(planned)
    centred = {step.key for step in planned.centring.centre}
    for verify in (True, False):
        dst = tmp_path / str(verify)
        convert_checkpoint(gpt2, dst, planned=planned, verify=verify)
        for key, tensor in load_file(dst / "model.safetensors").items():
            assert tensor.dtype == (torch.float32 if key in centred else stored)
        model = AutoModelForCausalLM.from_pretrained(dst, dtype="auto")
        assert all(record.converted for record in patch_model(model).swapped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_conversion_converted_again_keeps_weights_config_and_origin(
    gpt2, tmp_path, dtype
):
    AutoModelForCausalLM.from_pretrained(gpt2, dtype=dtype).save_pretrained(gpt2)
    for src, dst in (("src", "once"), ("once", "twice")):
        convert_checkpoint(tmp_path / src, tmp_path / dst, verify=False)
    once, twice = (contents(tmp_path / name) for name in ("once", "twice"))
    # which say how it was proven each time
    assert {name for name in once if once[name] != twice[name]} <= ADDED
    assert read(tmp_path / "twice" / "config.json")["hf_rmsnorm"]["source"] == "src"


def test_under_the_rules_of_windows(src, tmp_path, monkeypatch):
    """Nothing that is only open to be read, as a folder is, is flushed to the disk."""
    plan = tiny()[1]
    write_plan(plan, src, tmp_path / "posix")
    real = os.fsync

    def flushed(fd):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise PermissionError(13, "Permission denied")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", flushed)
        write_plan(plan, src, tmp_path / "windows")
    assert contents(tmp_path / "windows") == contents(tmp_path / "posix")
