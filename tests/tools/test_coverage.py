"""A sample of `python -m scripts.coverage patch`, and its committed table."""

import functools
import json
from pathlib import Path

import pytest
from places import SCRIPTS
from processes import python
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

import hf_rmsnorm
from scripts.coverage import launches, patch
from scripts.coverage.__main__ import main

COMMITTED = SCRIPTS / "results" / f"coverage-{transformers_version}.json"
MAPPINGS = {"causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "base": MODEL_MAPPING_NAMES}
TABLE = (
    json.loads(COMMITTED.read_text(encoding="utf-8")) if COMMITTED.exists() else None
)
# sums, norms of heads and rotations of every kind; norms that keep float32
SAMPLE = ("llama", "qwen3", "gemma3_text", "gpt2", "olmo", "zamba2", "cohere")
KEPT = (
    "hf_rmsnorm.patch_model",
    functools.partial(hf_rmsnorm.patch_model, exclude="*.1.*norm*"),
)


def coverage(types, *arguments) -> int:
    how = ("--mapping", "causal", "--jobs", "1", "--only", ",".join(types))
    return main(["patch", *how, *map(str, arguments)])


@pytest.mark.full
def test_a_sample_is_bit_equal_and_launches_what_the_committed_table_has(tmp_path):
    out = tmp_path / "sample.json"
    assert coverage(SAMPLE, "--out", out, "--check", COMMITTED) == 0
    table = json.loads(out.read_text(encoding="utf-8"))["mappings"]["causal"]["types"]
    assert {record["type"] for record in table} == set(SAMPLE)
    for record in table:
        assert record["ran"] and not record["wrong"]
        for run in record["runs"]:
            assert run["bit_equal"] and all(run["bit_equal"])
            assert run["launched"]["bfloat16"]["norms"] > 0
            assert run["launched"]["float32"]["norms"] > 0


@pytest.mark.full
def test_a_norm_that_no_longer_runs_as_a_kernel_is_named(tmp_path, monkeypatch, capfd):
    """Its model has the same bits, so nothing else would tell."""
    out = tmp_path / "before.json"
    types = ("llama", "qwen3")
    assert coverage(types, "--out", out) == 0
    monkeypatch.setattr(*KEPT)
    assert coverage(types, "--check", out) == 1
    words = capfd.readouterr().err
    assert "fewer launches: causal llama: bfloat16 norms 5 -> 3" in words
    assert "fewer launches: causal llama: float32 sums 2 -> 1" in words
    assert "fewer launches: causal qwen3: float32 qk_norms 4 -> 2" in words


def test_more_launches_and_types_that_were_not_tried_are_no_fall(capsys):
    before = {"a": {"bfloat16 norms": 2, "bfloat16 sums": 1}, "b": {"float32 norms": 1}}
    more = {"a": {"bfloat16 norms": 3, "bfloat16 sums": 1, "float32 norms": 1}}
    assert not launches.print_falls(before, more)
    assert launches.print_falls(before, {"a": {}})
    assert "a: bfloat16 norms 2 -> 0" in capsys.readouterr().err


@pytest.mark.full
def test_a_wrong_result_is_noticed():
    """A fused norm that is off by one part in a hundred shows in the model and in the
    norm alone.
    """
    code = """if True:
        import json
        from scripts.coverage import compare, patch
        from hf_rmsnorm.ops import norm
        real = norm.reference_norm
        norm.reference_norm = lambda *args: real(*args) * 1.01
        print(json.dumps(patch.wrong(compare.examine("llama", "base"))))
    """
    wrong = json.loads(python("-c", code).splitlines()[-1])
    assert "model: not bit_equal" in wrong
    assert any(line.startswith("norm (LlamaRMSNorm)") for line in wrong)
    assert not any("restored" in line or "saved" in line for line in wrong)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_the_committed_table_has_no_wrong_result_and_every_type(mapping):
    assert TABLE, f"run python -m scripts.coverage patch --out {COMMITTED}"
    part = TABLE["mappings"][mapping]
    assert {record["type"] for record in part["types"]} == set(MAPPINGS[mapping])
    for record in part["types"]:
        assert not record["wrong"], record["type"]
        assert record["ran"] or record["error"], record["type"]
    groups = [*part["left_alone"], *part["not_norms"]]
    assert all(group["reason"] for group in groups)
    assert all(TABLE["not_built"].values())


def unnamed(*folder: Path) -> set[str]:
    """Norm classes in the installed source that the committed table neither names nor
    lists as built by no type.
    """
    classes = patch.norm_classes(*folder).keys()
    return classes - patch.seen_classes(TABLE) - TABLE["not_built"].keys()


@pytest.mark.full
def test_every_norm_class_of_the_installed_transformers_is_swapped_or_named():
    assert not unnamed()


def test_a_new_norm_class_is_noticed(tmp_path):
    """As a new version of Transformers would bring it: with a forward of its own, or
    with that of another.
    """
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "modeling_new.py").write_text(
        "class NewRMSNorm(nn.Module):\n    def forward(self, x):\n        return x\n"
        "class NewerRMSNorm(NewRMSNorm):\n    pass\n"
        "class LlamaRMSNorm(nn.Module):\n    def forward(self, x):\n        return x\n"
    )
    assert unnamed(tmp_path) == {"NewRMSNorm", "NewerRMSNorm"}
