"""A source that is broken, or no checkpoint: one line with what, where and the cure,
and nothing is written.
"""

import json
import shutil
import struct

import pytest
import tiny_models
import torch
from checkpoints import (
    CONFIG,
    INDEX,
    assert_refused,
    tiny,
    trained,
    write_checkpoint,
    write_plan,
)
from safetensors.torch import load_file, save_file

from hf_rmsnorm import convert_checkpoint
from hf_rmsnorm.cli.main import main
from hf_rmsnorm.conversion import CentringPlan, ConversionRefused
from hf_rmsnorm.conversion.plan import Centre, Copy

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
PLAN = tiny()[1]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.fixture
def src(tmp_path):
    return write_checkpoint(tmp_path / "src", tiny()[0])


def shard_bytes(header, data=b""):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


DAMAGES = {
    "empty": lambda data: b"",
    "half a header": lambda data: data[:20],
    "a byte short": lambda data: data[:-1],
    "zeros": lambda data: bytes(len(data)),
    "huge header length": lambda data: struct.pack("<Q", 1 << 60) + data[8:],
    "hole": lambda data: shard_bytes(
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, bytes(12)
    ),
    "a pointer of Git LFS": lambda data: LFS,
    "a page of the web": lambda data: b"<!DOCTYPE html><html>not found</html>",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shards(src, damage):
    path = src / SECOND
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert_refused(PLAN, src, str(path), "truncated, corrupt", "git lfs pull")


@pytest.mark.parametrize("name", ["../src/" + FIRST, "/etc/passwd", "", ".."])
def test_an_index_that_names_no_file_beside_it(src, name):
    index = json.loads((src / INDEX).read_text())
    index["weight_map"]["wte.weight"] = name
    (src / INDEX).write_text(json.dumps(index))
    assert_refused(PLAN, src, INDEX, "missing in its folder", "the index again")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', "\xff"])
def test_a_damaged_index(src, text):
    (src / INDEX).write_bytes(text.encode("latin-1"))
    assert_refused(PLAN, src, INDEX, "download it again")


def pickled(folder, state):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.save(state, folder / "pytorch_model.bin")
    return folder


class Evil:
    """Its unpickling would leave a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


PICKLE = "pytorch_model.bin"


def test_pickles_run_no_code_and_torchs_unsafe_advice_is_not_repeated(tmp_path):
    src = pickled(tmp_path / "src", {"w": Evil(tmp_path / "ran")})
    assert_refused(PLAN, src, "pickles", "allow_pickle=True", "safetensors")
    what = f"{PICKLE}: a pickle that is broken, runs code"
    text = assert_refused(PLAN, src, what, allow_pickle=True)
    assert "weights_only" not in text
    assert not (tmp_path / "ran").exists()


TRAINING = {"state_dict": {"w": torch.ones(2)}, "step": 3}


@pytest.mark.parametrize("state", [TRAINING, [torch.ones(2)]], ids=["training", "list"])
def test_pickles_that_hold_no_state_dict(tmp_path, state):
    src = pickled(tmp_path / "src", state)
    assert_refused(PLAN, src, PICKLE, "more than plain tensors", allow_pickle=True)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", LFS])
def test_truncated_pickles(tmp_path, data):
    src = pickled(tmp_path / "src", {})
    (src / PICKLE).write_bytes(data)
    words = "broken", "git lfs pull"
    assert_refused(PLAN, src, PICKLE, *words, allow_pickle=True)


@pytest.mark.parametrize("part", [None, "text_config"])
def test_quantised_models(tmp_path, part):
    config = {"quantization_config": {"quant_method": "gptq"}}
    if part is not None:
        config = {part: config}
    src = write_checkpoint(tmp_path / "src", tiny()[0], config=config)
    what = "config.json: quantised: convert the unquantised model, then quantise"
    with pytest.raises(ConversionRefused, match=what):
        write_plan(PLAN, src, tmp_path / "dst")


def keep_a_variant(src):
    (src / FIRST).rename(src / "model.fp16.safetensors")
    for name in (SECOND, INDEX):
        (src / name).unlink()


def remove_weights(src):
    for path in src.glob("model*"):
        path.unlink()


def remove_index(src):
    (src / INDEX).unlink()


def remove_shard(src):
    (src / SECOND).unlink()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove_index, ["neither model.safetensors nor its index", "download"]),
        (remove_shard, [INDEX, SECOND, "missing", "download"]),
        (remove_weights, ["neither model.safetensors", "download what is missing"]),
        (keep_a_variant, ["neither model.safetensors", "rename a variant"]),
    ],
)
def test_folders_that_lack_something(src, spoil, words):
    spoil(src)
    assert_refused(PLAN, src, *words)


def test_folders_that_hold_no_checkpoint(src, tmp_path):
    assert_refused(PLAN, tmp_path / "nowhere", "nowhere", "there is no folder")
    (src / "adapter_config.json").write_text("{}")
    assert_refused(PLAN, src, "holds an adapter", "merge_and_unload")
    (src / "config.json").unlink()
    assert_refused(PLAN, src, "is an adapter", "merge_and_unload")
    (src / "adapter_config.json").unlink()
    assert_refused(PLAN, src, "has no config.json", "pass the folder")


def break_header(src):
    (src / SECOND).write_bytes(b"x")


def other_type(src):
    (src / "config.json").write_text('{"architectures": ["UNet"]}')


def other_shape(src):
    config = json.loads((src / "config.json").read_text())
    config["n_inner"] = 8
    (src / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "gpt2"
    model = tiny_models.build("gpt2")
    model.save_pretrained(folder, max_shard_size=model.num_parameters() * 3)
    return folder


@pytest.mark.parametrize(
    "spoil", [remove_shard, remove_index, break_header, other_type, other_shape]
)
def test_a_broken_folder_is_one_line_before_anything_is_printed(
    spoil, whole, tmp_path, capsys
):
    """The same whether the result is to be verified or not."""
    src = tmp_path / "src"
    shutil.copytree(whole, src)
    spoil(src)
    errors = set()
    for options in ([], ["--no-verify"]):
        assert main(["convert", str(src), str(tmp_path / "dst"), *options]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and str(src) in err, (out, err)
        errors.add(err)
    assert len(errors) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


TABLE = "wte.weight"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (Centre("nowhere", 0, 12), ["nowhere"]),
        (Copy("head", "nowhere"), ["nowhere"]),
        (Centre(TABLE, 2, 12), [TABLE, "another shape"]),
        (Centre(TABLE, 1, 5), [TABLE, "another shape"]),
        (Centre(TABLE, 1, 6, (1, 2)), [TABLE, "another shape"]),
        (Copy("h.0.out.bias", "h.0.scale"), ["h.0.out.bias", "differs", "h.0.scale"]),
    ],
    ids=str,
)
def test_plans_of_another_checkpoint(src, step, words):
    plan = CentringPlan(centre=(step,))
    if isinstance(step, Copy):
        plan = CentringPlan(copy=(step,))
    assert_refused(plan, src, *words)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_tensors_that_write_to_the_stream(tmp_path, dtype):
    src = write_checkpoint(tmp_path / "src", [{"w": torch.ones(4, 4).to(dtype)}])
    ways_out = ("quantised", "convert the unquantised model", "then quantise")
    assert_refused(CentringPlan(centre=(Centre("w", 0, 4),)), src, "w is", *ways_out)


LARGE = [6e4, -6e4, 6e4, 6e4, 6e4, 6e4]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([float("nan")] * 6, ["NaN or infinity in 'w (float16)'", "repair"]),
        (LARGE, ["NaN or infinity in 'w (float16)'", "bfloat16"]),
    ],
)
def test_what_centring_cannot_hold_leaves_nothing_behind(tmp_path, row, words):
    weight = trained(4, 6, dtype=torch.float16)
    weight[1] = torch.tensor(row)
    src = write_checkpoint(tmp_path / "src", [{"a": trained(2)}, {"w": weight}])
    assert_refused(CentringPlan(centre=(Centre("w", 1, 6),)), src, *words)


def other_names(folder, how):
    """Give the tensors of a GPT-2 other names that Transformers takes too, beside files
    that it does not read.
    """
    prefixed = load_file(folder / "model.safetensors")
    tensors = {}
    for name, tensor in prefixed.items():
        tensors[name.removeprefix("transformer.")] = tensor
    (folder / "model.safetensors").unlink()
    if how == "a pickle":
        torch.save(tensors, folder / PICKLE)
        return
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if how == "a variant":
        save_file(prefixed, folder / "model.fp16.safetensors")
    elif how == "a stale index":
        index = {"metadata": {}, "weight_map": dict.fromkeys(prefixed, FIRST)}
        (folder / INDEX).write_text(json.dumps(index))
    elif how == "a pointer of Git LFS":
        (folder / "consolidated.safetensors").write_bytes(LFS)
        (folder / PICKLE).write_bytes(LFS)
    elif how == "an adapter":
        lora = {"base_model.model.x.lora_A.weight": torch.ones(2, 2)}
        save_file(lora, folder / "adapter_model.safetensors")


@pytest.mark.parametrize(
    "how",
    ["a pickle", "a variant", "a stale index", "a pointer of Git LFS", "an adapter"],
)
def test_names_are_those_that_transformers_loads(how, tmp_path):
    src = tmp_path / "src"
    dst = tmp_path / "dst"
    tiny_models.build("gpt2").save_pretrained(src)
    other_names(src, how)
    convert_checkpoint(src, dst, verify=False, allow_pickle=how == "a pickle")
    made = load_file(dst / "model.safetensors")
    assert made["wte.weight"].mean(1).abs().max() < 1e-7
