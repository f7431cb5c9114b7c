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
from hf_rmsnorm.conversion import CentringPlan, ConversionError, ConversionRefused
from hf_rmsnorm.conversion.plan import Centre, Copy

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_to_the_conversion_in_memory(tmp_path, dtype):
    shards, plan = tiny(dtype)
    src = write_checkpoint(tmp_path / "src", shards, metadata={"format": "pt"})
    dst = tmp_path / "dst"
    write_plan(plan, src, dst)
    expected = in_memory(plan, load(src))
    assert_same(load(dst), expected)


@pytest.fixture
def src(tmp_path):
    shards, _ = tiny()
    return write_checkpoint(tmp_path / "src", shards, metadata={"format": "pt"})


@pytest.fixture
def dst(tmp_path):
    return tmp_path / "dst"


def convert(src, dst, **how):
    _, plan = tiny()
    return write_plan(plan, src, dst, **how)


def expected_of(tensors):
    _, plan = tiny()
    return in_memory(plan, tensors)


def metadata_of(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def read(path):
    return json.loads(path.read_text())


def test_every_file_of_the_checkpoint(src, dst):
    tokenizer = src / "tokenizer.json"
    tokenizer.write_bytes(b'{"a": 1}\r\n')
    pooling = src / "1_Pooling"
    pooling.mkdir()
    config = pooling / "config.json"
    config.write_text("{}")
    before = contents(src)
    convert(src, dst)
    assert contents(src) == before
    assert sorted(src.parent.iterdir()) == [dst, src]
    after = contents(dst)
    weights = {name for name in before if name.startswith("model")}
    assert after.keys() == (before.keys() - weights) | ADDED | {"model.safetensors"}
    for name in ("tokenizer.json", "1_Pooling/config.json"):
        assert after[name] == before[name]
    config = read(dst / "config.json")
    changes = {"tie_word_embeddings": False, "hf_rmsnorm": {"version": 1}}
    assert config == CONFIG | changes
    assert list(config) == [*CONFIG, "hf_rmsnorm"]
    metadata = metadata_of(dst / "model.safetensors")
    made = metadata.pop("hf_rmsnorm")
    assert "converted_by" in made
    assert metadata == {"format": "pt"}


@pytest.mark.parametrize("size", [700, "0.7KB", "1KB"])
def test_shards_are_at_most_of_a_size(src, dst, size):
    """A tensor that is larger has one of its own."""
    summary = convert(src, dst, max_shard_size=size)
    tensors = load(dst)
    assert_same(tensors, expected_of(load(src)))
    limit = 1000 if size == "1KB" else 700
    held = {}
    for name, file in read(dst / INDEX)["weight_map"].items():
        held.setdefault(file, []).append(tensors[name].nbytes)
    for file, sizes in held.items():
        assert len(sizes) == 1 or sum(sizes) <= limit
        assert summary.shards[file] == sum(sizes)
        assert metadata_of(dst / file)["format"] == "pt"
    total = read(dst / INDEX)["metadata"]["total_size"]
    assert total == sum(map(sum, held.values()))


@pytest.mark.parametrize("size", [0, -1, "2", "2GB, or so", "lots", 1.5, None])
def test_sizes_of_shards_that_are_none(src, dst, size):
    if size == "2":
        assert convert(src, dst, max_shard_size=size).shards
        return
    with pytest.raises(ConversionRefused, match="max_shard_size=.*: pass a number"):
        convert(src, dst, max_shard_size=size)
    assert not dst.exists()


def test_progress_and_summary_count_what_is_written(src, dst):
    seen = []

    def progress(*done):
        seen.append(done)

    result = convert(src, dst, progress=progress)
    tensors = load(dst)
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert result.tensors == len(tensors)
    assert result.bytes == size
    assert seen == sorted(seen)
    assert seen[-1] == (len(tensors), size, size)
    assert result.unused == ()


def test_shards_in_a_subfolder_are_read(src, dst):
    """Transformers loads them from where the index says that they are."""
    expected = expected_of(load(src))
    index = read(src / INDEX)
    files = index["weight_map"]
    for key, name in files.items():
        files[key] = f"parts/{name}"
    (src / INDEX).write_text(json.dumps(index))
    parts = src / "parts"
    parts.mkdir()
    for path in src.glob("model-*"):
        path.rename(parts / path.name)
    convert(src, dst)
    assert_same(load(dst), expected)


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
    "linked": "a link to a folder: copy it by hand",
}


def test_what_is_not_copied_is_named_with_its_reason(src, dst):
    for name in (*NOT_COPIED, "2_Dense/pytorch_model.bin", ".cache/x"):
        path = src / name
        path.parent.mkdir(exist_ok=True)
        if name not in (".cache", "linked"):
            path.write_bytes(b"old")
    (src / "linked").symlink_to(src)
    result = convert(src, dst)
    assert result.not_copied == NOT_COPIED
    carried = {"2_Dense/pytorch_model.bin"}
    whole = {"config.json", "model.safetensors"}
    assert set(contents(dst)) == whole | carried | ADDED
    training = "checkpoint-5/optimizer.pt, training_args.bin"
    assert f"not copied: {training} (state of the training" in str(result)


def linked(src):
    """The same checkpoint as a snapshot in the hub's cache, whose files are links."""
    repository = src.parent / "hub" / "models--org--name"
    blobs = repository / "blobs"
    snapshot = repository / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    src.rename(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    return snapshot


def test_links_of_the_hubs_cache_are_followed(src, dst):
    snapshot = linked(src)
    expected = expected_of(load(snapshot))
    convert(snapshot, dst)
    for path in dst.iterdir():
        assert not path.is_symlink()
    assert_same(load(dst), expected)


def to_a_sibling(src, path):
    """A link to a blob of another repository."""
    other = src.parents[2] / "models--org--other" / "blobs" / "x"
    other.parent.mkdir(parents=True)
    other.write_text("{}")
    path.symlink_to("../../../models--org--other/blobs/x")


def to_a_file(src, path):
    (src.parent / "outside").write_text("{}")
    path.symlink_to(src.parent / "outside")


def to_a_link(src, path):
    """A chain that begins within."""
    to_a_file(src, src / "middle.json")
    path.symlink_to("middle.json")


LINKS = {
    "a file": to_a_file,
    "a chain": to_a_link,
    "a device": lambda src, path: path.symlink_to("/dev/zero"),
    "nothing": lambda src, path: path.symlink_to(src / "nowhere"),
    "a circle": lambda src, path: path.symlink_to(path),
    "a pipe": lambda src, path: os.mkfifo(path),
    "a folder": lambda src, path: path.symlink_to(src.parent),
}
PLACES = ["notes.txt", "config.json", INDEX, "model-00001-of-00002.safetensors"]


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("kind", LINKS)
def test_what_is_no_file_of_the_source_is_not_read(src, dst, kind, name):
    """One line that names it, and nothing is written; of a folder the result says that
    it is not copied.
    """
    (src / name).unlink(missing_ok=True)
    LINKS[kind](src, src / name)
    if (kind, name) == ("a folder", "notes.txt"):
        done = convert(src, dst)
        assert done.not_copied == {name: "a link to a folder: copy it by hand"}
        return
    with pytest.raises(ConversionError) as error:
        convert(src, dst)
    text = str(error.value)
    assert any(word in text for word in (name, "middle.json", "nor its index"))
    assert "\n" not in text
    assert not dst.exists()


def test_a_sibling_in_the_cache_is_not_read(src, dst):
    snapshot = linked(src)
    to_a_sibling(snapshot, snapshot / "notes.txt")
    with pytest.raises(
        ConversionError, match="notes.txt: a link out of the checkpoint"
    ):
        convert(snapshot, dst)


def test_links_within_the_source_are_followed(src, dst):
    (src / "notes.txt").write_text("notes")
    (src / "again.txt").symlink_to(src / "notes.txt")
    (src / "sub").mkdir()
    (src / "sub" / "config.json").symlink_to("../config.json")
    convert(src, dst)
    assert (dst / "again.txt").read_text() == "notes"
    assert read(dst / "sub" / "config.json") == read(src / "config.json")
    assert not (dst / "again.txt").is_symlink()


OTHER_DTYPES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def test_tensors_of_every_dtype_keep_their_bytes(tmp_path, dst):
    tensors = {}
    for dtype in OTHER_DTYPES:
        values = torch.arange(6).view(2, 3)
        tensors[str(dtype)] = values.to(dtype)
    src = write_checkpoint(tmp_path / "src", [{**tensors, "w": trained(2, 4)}])
    centre = Centre("w", 1, 4)
    copy = Copy("again", "torch.int8")
    write_plan(CentringPlan((centre,), (copy,)), src, dst)
    converted = load(dst)
    tensors["again"] = tensors["torch.int8"]
    for name, before in tensors.items():
        after = converted[name]
        assert after.dtype == before.dtype
        assert torch.equal(after.view(torch.uint8), before.view(torch.uint8)), name


@pytest.mark.parametrize("zipped", [False, True])
def test_allowed_pickles_become_safetensors(src, dst, zipped):
    shards, _ = tiny()
    last = shards[1]
    transposed = last["h.0.out.weight"].t().contiguous()
    last["h.0.out.weight"] = transposed.t()
    index = (src / INDEX).read_text()
    index = index.replace("safetensors", "bin")
    index = index.replace("model-", "pytorch_model-")
    (src / "pytorch_model.bin.index.json").write_text(index)
    for path in src.glob("model*"):
        path.unlink()
    tensors = {}
    for number, shard in enumerate(shards, 1):
        path = src / f"pytorch_model-0000{number}-of-00002.bin"
        torch.save(shard, path, _use_new_zipfile_serialization=zipped)
        tensors |= shard
    convert(src, dst, allow_pickle=True)
    assert_same(load(dst), expected_of(tensors))
    assert not list(dst.glob("*.bin*"))
    for path in dst.glob("*.safetensors"):
        metadata = metadata_of(path)
        assert metadata["format"] == "pt"  # or Transformers does not load it


@pytest.fixture
def gpt2(tmp_path):
    model = tiny_models.build("gpt2")
    with torch.no_grad():
        for parameter in model.parameters():
            change = torch.randn_like(parameter) * 0.1 + 0.05
            parameter.add_(change)
    folder = tmp_path / "src"
    model.save_pretrained(folder)
    return folder


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
    assert said in str(planned)
    assert f"to keep {name}, set dtype to it" in str(planned)
    centred = {step.key for step in planned.centring.centre}
    for verify in (True, False):
        dst = tmp_path / str(verify)
        convert_checkpoint(gpt2, dst, planned=planned, verify=verify)
        for key, tensor in load_file(dst / "model.safetensors").items():
            expected = stored
            if key in centred:
                expected = torch.float32
            assert tensor.dtype == expected
        model = AutoModelForCausalLM.from_pretrained(dst, dtype="auto")
        for record in patch_model(model).swapped:
            assert record.converted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_conversion_converted_again_keeps_weights_config_and_origin(
    gpt2, tmp_path, dtype
):
    model = AutoModelForCausalLM.from_pretrained(gpt2, dtype=dtype)
    model.save_pretrained(gpt2)
    once = tmp_path / "once"
    twice = tmp_path / "twice"
    convert_checkpoint(gpt2, once, verify=False)
    convert_checkpoint(once, twice, verify=False)
    files = contents(once)
    again = contents(twice)
    for name in ADDED:  # which say how it was proven each time
        files.pop(name, None)
        again.pop(name, None)
    assert again == files
    record = read(twice / "config.json")["hf_rmsnorm"]
    assert record["source"] == "src"
