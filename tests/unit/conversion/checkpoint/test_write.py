"""A streamed conversion gives the bytes of one in memory, and every file that belongs to the checkpoint."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIG, contents, in_memory, load, nearest, tiny, trained, write_checkpoint, write_plan
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from hf_rmsnorm.conversion.checkpoint import expressions
from hf_rmsnorm.conversion.plan import Centre, CentringPlan, Copy, Scale

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def assert_same(result, expected):
    assert result.keys() == expected.keys()
    for key, value in expected.items():
        got = result[key]
        assert got.dtype == value.dtype and got.shape == value.shape, key
        if value.dtype == torch.float64:  # a sum of another order differs in the last bits of the mean
            assert torch.allclose(got, value, rtol=0, atol=1e-15 * value.abs().max().item() if value.numel() else 0)
        else:
            # Equal as bytes: a zero keeps its sign.
            assert torch.equal(got.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key


@st.composite
def cases(draw):
    """Tensors in shards, and a plan that centres, scales and copies some of them."""
    shards, centre, scale, copy = [{} for _ in range(draw(st.integers(1, 3)))], [], [], []
    for number in range(draw(st.integers(1, 4))):
        key, shard = f"t{number}", shards[draw(st.integers(0, len(shards) - 1))]
        dtype = draw(st.sampled_from(DTYPES))
        ndim = draw(st.integers(1, 3))
        axis = draw(st.integers(0, ndim - 1))
        block, count = draw(st.integers(1, 5)), draw(st.integers(1, 4))
        shape = [draw(st.integers(1, 7)) for _ in range(ndim)]
        shape[axis] = block * count
        shard[key] = trained(*shape, dtype=dtype, seed=draw(st.integers(0, 99)))
        if draw(st.booleans()):
            blocks = draw(st.none() | st.sets(st.integers(0, count - 1), min_size=1).map(lambda s: tuple(sorted(s))))
            centre.append(Centre(key, axis, block, blocks))
        if draw(st.booleans()):
            along = draw(st.integers(0, ndim - 1))
            by = f"{key}.scale"
            other = shards[draw(st.integers(0, len(shards) - 1))]
            other[by] = trained(shape[along], dtype=draw(st.sampled_from(DTYPES)), seed=7)
            scale.append(Scale(key, along, by))
        if draw(st.booleans()):
            copy.append(Copy(f"{key}.copy", key))
            if draw(st.booleans()):
                centre.append(Centre(f"{key}.copy", axis, block))
    shards = [shard or {f"only{i}": torch.arange(3)} for i, shard in enumerate(shards)]
    return shards, CentringPlan(centre=tuple(centre), scale=tuple(scale), copy=tuple(copy))


@given(case=cases(), chunk=st.sampled_from([1, 3, 8, 40, 1 << 20]))
def test_equal_to_the_conversion_in_memory(case, chunk):
    shards, plan = case
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(expressions, "PIECE", chunk)
        src = write_checkpoint(Path(folder) / "src", shards, metadata={"format": "pt"})
        write_plan(plan, src, Path(folder) / "dst")
        assert_same(load(f"{folder}/dst"), in_memory(plan, load(src)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_two_block_lengths_in_one_fused_tensor(tmp_path, monkeypatch, dtype, chunk):
    """Queries of 8 and keys of 4 in one tensor, each with its own norm; values are not touched."""
    monkeypatch.setattr(expressions, "PIECE", chunk)
    plan = CentringPlan(centre=(Centre("qkv", 0, 8, (0,)), Centre("qkv", 0, 4, (2,))))
    src = write_checkpoint(tmp_path / "src", [{"qkv": trained(16, 5, dtype=dtype)}])
    write_plan(plan, src, tmp_path / "dst")
    assert_same(load(tmp_path / "dst"), in_memory(plan, load(src)))


def test_values_are_rounded_once():
    """A cast to bfloat16 by way of float32 rounds these a second time, from a tie that is none."""
    for dtype in (torch.bfloat16, torch.float16):
        steps = torch.tensor([1.0, -1.0, 3.0, 1e-39, 6e-6, 200.0], dtype=torch.float64)
        y = nearest(steps, dtype).double()
        up = (nearest(steps, dtype).view(torch.int16) + 1).view(dtype).double()
        tie = (y + up) / 2
        x = torch.cat([tie * (1 + d) for d in (-1e-10, -1e-14, 0, 1e-14, 1e-10)])
        assert torch.equal(expressions.rounded(x, dtype), nearest(x, dtype))
        assert not torch.equal(expressions.rounded(x, dtype), x.to(dtype))  # else this test shows nothing


def test_every_file_of_the_checkpoint(tmp_path):
    shards, plan = tiny()
    src = write_checkpoint(tmp_path / "src", shards, metadata={"format": "pt", "who": "é"}, total_parameters=True)
    (src / "tokenizer.json").write_bytes(b'{"a": 1}\r\n')
    (src / "modeling_x.py").write_text("x = 1\n")
    (src / "1_Pooling").mkdir()
    (src / "1_Pooling" / "config.json").write_text("{}")
    for name in ("pytorch_model.bin", "tf_model.h5", "model.gguf", "consolidated.safetensors", "onnx.onnx"):
        (src / name).write_bytes(b"old")
    (src / "2_Dense").mkdir()  # a module of sentence-transformers; the others are this model, earlier or exported
    (src / "2_Dense" / "config.json").write_text('{"in_features": 12}')
    old = ("checkpoint-5/model.safetensors", "checkpoint-5/optimizer.pt", "best/model.safetensors", "onnx/model.onnx")
    for name in ("2_Dense/pytorch_model.bin", *old):
        (src / name).parent.mkdir(exist_ok=True)
        (src / name).write_bytes(b"old")
    (src / "best" / "config.json").write_text(json.dumps(CONFIG))
    (src / ".cache").mkdir()
    (src / ".cache" / "x").write_text("of the download")
    before = contents(src)
    seen = []
    result = write_plan(plan, src, tmp_path / "dst", progress=lambda *done: seen.append(done))

    dst = tmp_path / "dst"
    assert contents(src) == before
    names = [path.name for path in sorted(src.glob("model-*"))]
    verbatim = {"tokenizer.json", "modeling_x.py", "1_Pooling/config.json", "best/config.json"}
    verbatim |= {"2_Dense/config.json", "2_Dense/pytorch_model.bin"}
    assert set(contents(dst)) == {*names, "model.safetensors.index.json", "config.json", *verbatim}
    for name in verbatim:
        assert contents(dst)[name] == before[name]
    assert sorted(tmp_path.iterdir()) == [dst, src]
    assert_same(load(dst), in_memory(plan, load(src)))

    text = (dst / "config.json").read_text()
    config = json.loads(text)
    assert config == CONFIG | {"tie_word_embeddings": False, "rope": {"theta": 1e-05, "b": 3, "c": 4}} | {
        "hf_rmsnorm": {"version": 1}
    }
    assert list(config) == [*CONFIG, "hf_rmsnorm"] and text.endswith("}\n")
    for name in names:
        with safe_open(dst / name, "pt") as file:
            assert file.metadata() == {"format": "pt", "who": "é"}
    index, before = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (dst, src))
    head = shards[0]["wte.weight"]
    assert index["metadata"] == {
        "total_size": before["metadata"]["total_size"] + head.nbytes,
        "kept": "x",
        "total_parameters": before["metadata"]["total_parameters"] + head.numel(),
    }
    assert index["weight_map"] == before["weight_map"] | {"lm_head.weight": names[0]}

    assert set(result.not_copied) == {
        "pytorch_model.bin", "tf_model.h5", "model.gguf", "consolidated.safetensors", "onnx.onnx", *old
    }  # fmt: skip
    assert result.added == ("lm_head.weight",) and result.resumed == 0
    assert set(result.changed) == {"h.0.scale", *(centre.key for centre in plan.centre)}
    assert result.shards.items() <= contents(dst).items() and result.unused == ()
    assert seen[-1] == (result.tensors, result.bytes, result.bytes) and seen == sorted(seen)
    assert result.tensors == len(load(dst)) and result.bytes == sum(t.nbytes for t in load(dst).values())


def test_the_record_of_another_conversion_goes(tmp_path):
    shards, plan = tiny()
    src = write_checkpoint(tmp_path / "src", shards, config={**CONFIG, "hf_rmsnorm": {"rms_norms": {"ln_f": {}}}})
    write_plan(plan, src, tmp_path / "dst")
    assert json.loads((tmp_path / "dst" / "config.json").read_text())["hf_rmsnorm"] == plan.config["hf_rmsnorm"]


def test_a_plan_that_does_nothing_copies_every_byte(tmp_path):
    shards, _ = tiny()
    src = write_checkpoint(tmp_path / "src", shards)
    write_plan(CentringPlan(), src, tmp_path / "dst")
    assert contents(tmp_path / "dst") == contents(src)


def test_tensors_of_every_dtype_keep_their_bytes(tmp_path):
    names = ("float8_e4m3fn", "float8_e5m2", "int64", "int8", "uint8", "bool", "complex64")
    tensors = {name: torch.arange(6).view(2, 3).to(getattr(torch, name)) for name in names}
    src = write_checkpoint(tmp_path / "src", [tensors | {"w": trained(2, 4)}])
    plan = CentringPlan(centre=(Centre("w", 1, 4),), copy=(Copy("again", "int8"),))
    write_plan(plan, src, tmp_path / "dst")
    assert_same(load(tmp_path / "dst"), in_memory(plan, load(src)))


def test_metadata_is_added_to_every_shard(tmp_path):
    shards, plan = tiny()
    src = write_checkpoint(tmp_path / "src", shards, metadata={"format": "pt"})
    write_plan(plan, src, tmp_path / "dst", metadata={"hf_rmsnorm": '{"version": 1}'})
    for path in (tmp_path / "dst").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt", "hf_rmsnorm": '{"version": 1}'}
    assert_same(load(tmp_path / "dst"), in_memory(plan, load(src)))


def test_a_head_that_is_stored_already_is_not_stored_twice(tmp_path):
    """Tied models are also saved with both names; then the copy is there."""
    shards, plan = tiny()
    shards[1]["lm_head.weight"] = shards[0]["wte.weight"].clone()
    src = write_checkpoint(tmp_path / "src", shards)
    result = write_plan(plan, src, tmp_path / "dst")
    assert result.added == ()
    assert torch.equal(load(tmp_path / "dst")["lm_head.weight"], shards[0]["wte.weight"])


def test_links_of_a_download_cache_are_followed(tmp_path):
    shards, plan = tiny()
    blobs = write_checkpoint(tmp_path / "blobs", shards)
    (tmp_path / "src").mkdir()
    for path in blobs.iterdir():
        (tmp_path / "src" / path.name).symlink_to(path)
    write_plan(plan, tmp_path / "src", tmp_path / "dst")
    assert not any(path.is_symlink() for path in (tmp_path / "dst").iterdir())
    assert_same(load(tmp_path / "dst"), in_memory(plan, load(blobs)))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_allowed_pickles_become_safetensors(tmp_path, sharded, zipped):
    shards, plan = tiny()
    shards[1]["h.0.out.weight"] = shards[1]["h.0.out.weight"].t().contiguous().t()  # stored transposed
    shards = shards if sharded else [shards[0] | shards[1]]
    src = tmp_path / "src"
    src.mkdir()
    (src / "config.json").write_text(json.dumps(CONFIG))
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)] if sharded else ["pytorch_model.bin"]
    for name, shard in zip(names, shards, strict=True):
        torch.save(shard, src / name, _use_new_zipfile_serialization=zipped)
    if sharded:
        weights = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        (src / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    before = contents(src)
    write_plan(plan, src, tmp_path / "dst", allow_pickle=True)
    tensors = {key: tensor for shard in shards for key, tensor in shard.items()}
    assert_same(load(tmp_path / "dst"), in_memory(plan, tensors))
    assert contents(src) == before and not list((tmp_path / "dst").glob("*.bin*"))
    if sharded:
        index = json.loads((tmp_path / "dst" / "model.safetensors.index.json").read_text())
        assert index["weight_map"]["h.0.scale"] == "model-00002-of-00002.safetensors"
        assert set(index["weight_map"]) == {*tensors, "lm_head.weight"}
    with safe_open(next((tmp_path / "dst").glob("*.safetensors")), "pt") as file:
        assert file.metadata() == {"format": "pt"}  # or Transformers does not load it


def test_transformers_loads_the_result(tmp_path):
    """Sharded by Transformers itself, tied, converted, and read back by it without this package's help."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=32)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1 + 0.05)
    model.save_pretrained(tmp_path / "src", max_shard_size="6KB")
    writers = ["wte.weight", "wpe.weight"]
    writers += [
        f"h.{i}.{part}.c_proj.{kind}" for i in (0, 1) for part in ("attn", "mlp") for kind in ("weight", "bias")
    ]
    plan = CentringPlan(
        centre=tuple(Centre(f"transformer.{key}", 0 if key.endswith("bias") else 1, 16) for key in writers),
        copy=(Copy("lm_head.weight", "transformer.wte.weight"),),
        config={"tie_word_embeddings": False},
    )
    result = write_plan(plan, tmp_path / "src", tmp_path / "dst")
    assert len(result.shards) > 2
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "dst").eval()
    assert converted.transformer.wte.weight.mean(1).abs().max() < 1e-8
    ids = torch.randint(0, 50, (2, 16))
    with torch.no_grad():
        expected, got = (m.double()(ids).logits for m in (model, converted))
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()  # the float32 rounding of the weights
