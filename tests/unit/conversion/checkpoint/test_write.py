"""A streamed conversion gives the tensors of one in memory, and every file that belongs
to the checkpoint.
"""

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


def test_every_file_of_the_checkpoint(tmp_path):
    shards, plan = tiny()
    src = write_checkpoint(
        tmp_path / "src", shards, metadata={"format": "pt", "who": "é"}
    )
    (src / "tokenizer.json").write_bytes(b'{"a": 1}\r\n')
    (src / "1_Pooling").mkdir()
    (src / "1_Pooling" / "config.json").write_text("{}")
    before = contents(src)
    seen = []
    result = write_plan(
        plan, src, tmp_path / "dst", progress=lambda *done: seen.append(done)
    )
    dst, names = tmp_path / "dst", [path.name for path in sorted(src.glob("model-*"))]
    assert contents(src) == before and sorted(tmp_path.iterdir()) == [dst, src]
    verbatim = {"tokenizer.json", "1_Pooling/config.json"}
    assert set(contents(dst)) == {*names, INDEX, "config.json", *verbatim, *ADDED}
    assert all(contents(dst)[name] == before[name] for name in verbatim)
    config = json.loads((dst / "config.json").read_text())
    changes = {"tie_word_embeddings": False, "hf_rmsnorm": {"version": 1}}
    assert config == CONFIG | changes and list(config) == [*CONFIG, "hf_rmsnorm"]
    for name in names:
        with safe_open(dst / name, "pt") as file:
            assert {**file.metadata(), "hf_rmsnorm": ""} == {
                "format": "pt",
                "who": "é",
                "hf_rmsnorm": "",
            }
    new, old = (json.loads((folder / INDEX).read_text()) for folder in (dst, src))
    head = shards[0]["wte.weight"]
    grown = {"total_size": head.nbytes, "total_parameters": head.numel()}
    assert new["metadata"] == old["metadata"] | {
        key: old["metadata"][key] + more for key, more in grown.items()
    }
    assert new["weight_map"] == old["weight_map"] | {"lm_head.weight": names[0]}
    assert (
        result.added == ("lm_head.weight",)
        and result.resumed == 0
        and result.unused == ()
    )
    assert set(result.changed) == {centre.key for centre in plan.centre}
    assert seen[-1] == (result.tensors, result.bytes, result.bytes) and seen == sorted(
        seen
    )
    assert result.tensors == len(load(dst)) and result.bytes == sum(
        t.nbytes for t in load(dst).values()
    )


def test_shards_in_a_subfolder_stay_there(tmp_path):
    """Transformers loads them from where the index says that they are."""
    shards, plan = tiny()
    src = write_checkpoint(tmp_path / "src", shards, metadata={"format": "pt"})
    expected = in_memory(plan, load(src))
    index = json.loads((src / INDEX).read_text())
    index["weight_map"] = {
        key: f"parts/{name}" for key, name in index["weight_map"].items()
    }
    (src / INDEX).write_text(json.dumps(index))
    (src / "parts").mkdir()
    for path in src.glob("model-*"):
        path.rename(src / "parts" / path.name)
    write_plan(plan, src, tmp_path / "dst")
    assert {
        *json.loads((tmp_path / "dst" / INDEX).read_text())["weight_map"].values()
    } == {*index["weight_map"].values()}
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


def test_what_is_not_copied_is_named_with_its_reason(tmp_path):
    shards, plan = tiny()
    src = write_checkpoint(tmp_path / "src", shards)
    for name in (*NOT_COPIED, "2_Dense/pytorch_model.bin", ".cache/x"):
        path = src / name
        path.parent.mkdir(exist_ok=True)
        if name not in (".cache", "loop"):
            path.write_bytes(b"old")
    (src / "loop").symlink_to(src)
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "config.json").write_text("{}")
    (src / "3_Linked").symlink_to(tmp_path / "elsewhere")
    result = write_plan(plan, src, tmp_path / "dst")
    assert result.not_copied == NOT_COPIED
    carried = {
        "2_Dense/pytorch_model.bin",
        "3_Linked/deep/config.json",
    }
    shards = {path.name for path in src.glob("model-*")}
    assert set(contents(tmp_path / "dst")) == {
        *shards,
        INDEX,
        "config.json",
        *carried,
        *ADDED,
    }
    text = str(result)
    assert (
        "not copied: training_args.bin, checkpoint-5/optimizer.pt (state of the training"
        in text.replace(
            "checkpoint-5/optimizer.pt, training_args.bin",
            "training_args.bin, checkpoint-5/optimizer.pt",
        )
    )


def test_links_of_a_download_cache_are_followed(tmp_path):
    shards, plan = tiny()
    blobs = write_checkpoint(tmp_path / "blobs", shards)
    (tmp_path / "src").mkdir()
    for path in blobs.iterdir():
        (tmp_path / "src" / path.name).symlink_to(path)
    write_plan(plan, tmp_path / "src", tmp_path / "dst")
    assert not any(path.is_symlink() for path in (tmp_path / "dst").iterdir())
    assert_same(load(tmp_path / "dst"), in_memory(plan, load(blobs)))


def test_a_header_keeps_no_stale_tie(tmp_path):
    shards, plan = tiny()
    ties = {
        "format": "pt",
        "lm_head.weight": "wte.weight",
        "other.weight": "wte.weight",
    }
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
    tensors = {
        name: torch.arange(6).view(2, 3).to(getattr(torch, name)) for name in names
    }
    src = write_checkpoint(tmp_path / "src", [tensors | {"w": trained(2, 4)}])
    write_plan(
        CentringPlan(centre=(Centre("w", 1, 4),), copy=(Copy("again", "int8"),)),
        src,
        tmp_path / "dst",
    )
    before, after = load(src), load(tmp_path / "dst")
    for name in (*names, "again"):
        raw = [
            t.reshape(-1).view(torch.uint8)
            for t in (after[name], before[name if name != "again" else "int8"])
        ]
        assert torch.equal(*raw), name


@pytest.mark.parametrize("zipped", [False, True])
def test_allowed_pickles_become_safetensors(tmp_path, zipped):
    shards, plan = tiny()
    # stored transposed
    shards[1]["h.0.out.weight"] = shards[1]["h.0.out.weight"].t().contiguous().t()
    src = tmp_path / "src"
    src.mkdir()
    (src / "config.json").write_text(json.dumps(CONFIG))
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    for name, shard in zip(names, shards, strict=True):
        torch.save(shard, src / name, _use_new_zipfile_serialization=zipped)
    weights = {
        key: name for name, shard in zip(names, shards, strict=True) for key in shard
    }
    (src / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weights})
    )
    write_plan(plan, src, tmp_path / "dst", allow_pickle=True)
    tensors = {key: tensor for shard in shards for key, tensor in shard.items()}
    assert_same(load(tmp_path / "dst"), in_memory(plan, tensors))
    index = json.loads((tmp_path / "dst" / INDEX).read_text())
    assert index["weight_map"]["h.0.scale"] == "model-00002-of-00002.safetensors"
    assert set(index["weight_map"]) == {*tensors, "lm_head.weight"} and not list(
        (tmp_path / "dst").glob("*.bin*")
    )
    with safe_open(next((tmp_path / "dst").glob("*.safetensors")), "pt") as file:
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
    tensors = {
        name: tensor.to(stored)
        for name, tensor in load_file(gpt2 / "model.safetensors").items()
    }
    save_file(tensors, gpt2 / "model.safetensors", metadata={"format": "pt"})
    planned = plan_conversion(gpt2)
    name = str(stored).removeprefix("torch.")
    said = f"config.json says float32 and tensors are stored in {name}: those that are changed are written in float32"
    assert said in str(planned) and f"to keep {name}, set dtype to it" in str(planned)
    for verify in (True, False):
        convert_checkpoint(gpt2, tmp_path / str(verify), planned=planned, verify=verify)
        made = load_file(tmp_path / str(verify) / "model.safetensors")
        assert {
            key for key, tensor in made.items() if tensor.dtype == torch.float32
        } == {centre.key for centre in planned.centring.centre}
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / str(verify), dtype="auto"
        )
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
    assert (
        json.loads((tmp_path / "twice" / "config.json").read_text())["hf_rmsnorm"][
            "source"
        ]
        == "src"
    )


def test_under_the_rules_of_windows(tmp_path, monkeypatch):
    """No folder is opened, and nothing that is open to be read is flushed to the disk."""
    shards, plan = tiny()
    src = write_checkpoint(tmp_path / "src", shards)
    write_plan(plan, src, tmp_path / "posix")
    real = os.open

    def opened(path, flags, *mode, **how):
        if os.path.isdir(path) or not flags & (os.O_RDWR | os.O_WRONLY):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *mode, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        patch.setattr("hf_rmsnorm.conversion.checkpoint.write.WINDOWS", True)
        write_plan(plan, src, tmp_path / "windows")
    assert contents(tmp_path / "windows") == contents(tmp_path / "posix")
