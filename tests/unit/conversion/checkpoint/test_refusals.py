"""A source or a plan that does not fit: one line with what, where and the cure, and nothing is written."""

import json
import struct

import pytest
import torch
from checkpoints import CONFIG, contents, tiny, trained, write_checkpoint, write_plan
from safetensors.torch import save_file

from hf_rmsnorm.conversion import ConversionError
from hf_rmsnorm.conversion.plan import Centre, CentringPlan, Copy, Scale

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def assert_refused(plan, src, *words, **arguments):
    before = sorted(src.parent.rglob("*")), contents(src) if src.is_dir() else None
    with pytest.raises(ConversionError) as error:
        write_plan(plan, src, src.parent / "dst", **arguments)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text
    assert (sorted(src.parent.rglob("*")), contents(src) if src.is_dir() else None) == before


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


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (CentringPlan(centre=(Centre("nowhere", 0, 12),)), ["nowhere", "plan"]),
        (CentringPlan(copy=(Copy("head", "nowhere"),)), ["nowhere", "plan"]),
        (CentringPlan(scale=(Scale("nowhere", 0, "h.0.scale"),)), ["nowhere", "plan"]),
        (CentringPlan(scale=(Scale("h.0.out.weight", 0, "nowhere"),)), ["nowhere", "plan"]),
        (CentringPlan(scale=(Scale("h.0.out.weight", 1, "h.0.scale"),)), ["h.0.scale", "[12]", "24"]),
        (CentringPlan(scale=(Scale("h.0.out.weight", 2, "h.0.scale"),)), ["[12, 24]", "no axis 2"]),
        (CentringPlan(centre=(Centre("wte.weight", 2, 12),)), ["[20, 12]", "no axis 2"]),
        (CentringPlan(centre=(Centre("wte.weight", -1, 12),)), ["no axis -1"]),
        (CentringPlan(centre=(Centre("wte.weight", 1, 5),)), ["wte.weight", "12 elements", "blocks of 5"]),
        (CentringPlan(centre=(Centre("wte.weight", 1, 0),)), ["blocks of 0"]),
        (CentringPlan(centre=(Centre("wte.weight", 1, 6, (1, 2)),)), ["blocks of 6", "1 2"]),
        (CentringPlan(centre=(Centre("wte.weight", 1, 6, (-1,)),)), ["blocks of 6", "-1"]),
        (CentringPlan(centre=(Centre("wte.weight", 1, 12), Centre("wte.weight", 0, 20))), ["two axes"]),
        (CentringPlan(centre=(Centre("wte.weight", 1, 12), Centre("wte.weight", 1, 4, (2,)))), ["twice"]),
        (CentringPlan(centre=(Centre("wte.weight", 1, 6, (0,)), Centre("wte.weight", 1, 4, (1,)))), ["twice"]),
        (CentringPlan(centre=(Centre("wte.weight", 1, 6, (1, 1)),)), ["twice"]),
        (CentringPlan(copy=(Copy("head", "wte.weight"), Copy("head", "h.0.scale"))), ["head", "two tensors"]),
        (CentringPlan(copy=(Copy("h.0.out.bias", "h.0.scale"),)), ["h.0.out.bias", "differs", "h.0.scale"]),
        (CentringPlan(copy=(Copy("wte.weight", "h.0.scale"),)), ["wte.weight", "differs", "h.0.scale"]),
        (
            CentringPlan(
                centre=(Centre("h.0.scale", 0, 12),), scale=(Scale("h.0.out.weight", 0, "h.0.scale"),)
            ),
            ["h.0.scale", "also changes it"],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_plans_that_do_not_fit(src, plan, words):
    assert_refused(plan, src, *words, "plan")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_quantised_tensors_that_write_to_the_stream(tmp_path, dtype):
    src = write_checkpoint(tmp_path / "src", [{"w": torch.ones(4, 4).to(dtype), "by": torch.ones(4).to(dtype)}])
    ways_out = ("quantised", "convert the unquantised model", "then quantise")
    assert_refused(CentringPlan(centre=(Centre("w", 0, 4),)), src, "w is", *ways_out)
    assert_refused(CentringPlan(scale=(Scale("w", 0, "by"),)), src, "by is", *ways_out)


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
    with pytest.raises(ConversionError, match="tokenizer.json: no such file"):
        write_plan(PLAN, src, src.parent / "dst")


def test_metadata_that_is_no_string(src):
    assert_refused(PLAN, src, "metadata 'plan'", "json.dumps", metadata={"plan": {"a": 1}})


@pytest.fixture
def pickled(tmp_path):
    src = tmp_path / "src"
    src.mkdir()
    (src / "config.json").write_text(json.dumps(CONFIG))
    return src


class Evil:
    """Its unpickling would leave a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickles_are_refused_unless_allowed(pickled):
    first, second = tiny()[0]
    torch.save(first | second, pickled / "pytorch_model.bin")
    assert_refused(PLAN, pickled, str(pickled), "pickles", "--allow-pickle", "safetensors")


def test_pickles_run_no_code(pickled):
    torch.save({"w": Evil(pickled / "ran")}, pickled / "pytorch_model.bin")
    assert_refused(PLAN, pickled, "pytorch_model.bin", "weights_only", "safetensors", allow_pickle=True)
    assert not (pickled / "ran").exists()


@pytest.mark.parametrize(
    "state",
    [
        {"model": {"w": torch.ones(2)}, "step": 3},
        [torch.ones(2)],
        {"w": torch.ones(2, 2).to_sparse()},
        {"w": torch.ones(2, dtype=torch.complex64)},
    ],
    ids=["nested", "list", "sparse", "complex"],
)
def test_pickles_that_hold_no_state_dict(pickled, state):
    torch.save(state, pickled / "pytorch_model.bin")
    assert_refused(PLAN, pickled, "pytorch_model.bin", "state dict", allow_pickle=True)


@pytest.mark.parametrize("cut", [0, 10, 500])
def test_truncated_pickles(pickled, cut):
    torch.save(tiny()[0][0], pickled / "pytorch_model.bin")
    data = (pickled / "pytorch_model.bin").read_bytes()
    (pickled / "pytorch_model.bin").write_bytes(data[:cut])
    assert_refused(PLAN, pickled, "pytorch_model.bin", allow_pickle=True)
