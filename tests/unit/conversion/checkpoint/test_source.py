"""A source that is broken, or no checkpoint: one line with what, where and the cure, and nothing is written."""

import json
import struct

import pytest
from checkpoints import assert_refused, tiny, trained, write_checkpoint, write_plan
from safetensors.torch import save_file

from hf_rmsnorm.conversion import ConversionError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def src(tmp_path):
    return write_checkpoint(tmp_path / "src", tiny()[0])


PLAN = tiny()[1]


def shard_bytes(header, data=b""):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(start, stop, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


DAMAGES = {
    "empty": lambda data: b"",
    "half a header": lambda data: data[:20],
    "half the data": lambda data: data[: len(data) // 2],
    "a byte short": lambda data: data[:-1],
    "a byte more": lambda data: data + b"x",
    "zeros": lambda data: bytes(len(data)),
    "header not JSON": lambda data: data[:8] + b"!" + data[9:],
    "huge header length": lambda data: struct.pack("<Q", 1 << 60) + data[8:],
    "overlap": lambda data: shard_bytes({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
    "hole": lambda data: shard_bytes({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20)),
    "shape": lambda data: shard_bytes({"a": entry(0, 8, (3,))}, bytes(8)),
    "dtype": lambda data: shard_bytes({"a": entry(0, 8, dtype="Q4_K")}, bytes(8)),
    "a page of the web": lambda data: b"<!DOCTYPE html><html>not found</html>",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_damaged_shards(src, damage, name):
    path = src / name
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert_refused(PLAN, src, str(path), "truncated or corrupt", "download it again")


def edit_index(src, change):
    index = json.loads((src / INDEX).read_text())
    change(index["weight_map"])
    (src / INDEX).write_text(json.dumps(index))


def test_a_missing_shard(src):
    (src / SECOND).unlink()
    assert_refused(PLAN, src, INDEX, SECOND, "missing", "download")


def test_an_index_that_names_a_missing_tensor(src):
    edit_index(src, lambda names: names.update({"h.1.out.weight": SECOND}))
    assert_refused(PLAN, src, INDEX, "h.1.out.weight", SECOND, "download")


def test_an_index_that_names_the_wrong_shard(src):
    edit_index(src, lambda names: names.update({"wte.weight": SECOND}))
    assert_refused(PLAN, src, INDEX, "wte.weight", SECOND)


@pytest.mark.parametrize("name", ["../src/" + FIRST, "/etc/passwd", "", ".", ".."])
def test_an_index_that_names_no_file_beside_it(src, name):
    edit_index(src, lambda names: names.update({"wte.weight": name}))
    assert_refused(PLAN, src, INDEX, "no file beside it", "download it again")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"wte.weight": 7}}', "\xff"]
)
def test_a_damaged_index(src, text):
    (src / INDEX).write_bytes(text.encode("latin-1"))
    assert_refused(PLAN, src, INDEX, "download it again")


def test_a_tensor_in_two_shards(src):
    save_file({**tiny()[0][1], "wte.weight": trained(20, 12)}, src / SECOND)
    assert_refused(PLAN, src, "wte.weight", "two shards", FIRST, SECOND)


@pytest.mark.parametrize("nested", [False, True])
def test_quantised_models(tmp_path, nested):
    config = {"quantization_config": {"quant_method": "gptq"}}
    src = write_checkpoint(tmp_path / "src", tiny()[0], config={"text_config": config} if nested else config)
    assert_refused(PLAN, src, "config.json", "quantised", "convert the unquantised model", "then quantise")


def test_folders_that_hold_no_checkpoint(src, tmp_path):
    assert_refused(PLAN, tmp_path / "nowhere", "nowhere", "no such folder")
    assert_refused(PLAN, src / "config.json", "no such folder")
    (src / INDEX).unlink()
    assert_refused(PLAN, src, "neither", "download the weights")
    (src / "config.json").write_text("{")
    assert_refused(PLAN, src, "config.json", "not JSON")
    (src / "config.json").unlink()
    assert_refused(PLAN, src, "no config.json")


def test_a_dangling_link_in_the_source(src):
    (src / "tokenizer.json").symlink_to(src / "blob")
    with pytest.raises(
        ConversionError,
        match="tokenizer.json: no such file or directory: put it there, or mend the link .* convert again$",
    ):
        write_plan(PLAN, src, src.parent / "dst")
