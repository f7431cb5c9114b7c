"""A file that is exported of a patched model: the module's own arithmetic, or the
operator where it is asked for.
"""

import json

import pytest
import tiny_models
import torch
from processes import python
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import count_launches, patch_model, use_backend

X = torch.linspace(-2, 3, 16).view(2, 8)
ANY_ROWS = ({0: torch.export.Dim("rows")},)


def norms():
    """(two norms, patched; what they compute without the patch)."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), LlamaRMSNorm(8))
    expected = model(X).detach()
    patch_model(model)
    return model, expected


def operators(program) -> set[str]:
    """The names of the operators of a graph, with where they come from."""
    return {
        str(node.target) for node in program.graph.nodes if node.op == "call_function"
    }


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_graph_has_the_modules_own_operators(strict):
    model, expected = norms()
    how = {"dynamic_shapes": ANY_ROWS, "strict": strict}
    program = torch.export.export(model, (X,), **how)
    assert "aten.layer_norm.default" in operators(program)
    assert not [name for name in operators(program) if "hf_rmsnorm" in name]
    assert torch.equal(program.module()(X), expected)
    assert program.module()(X.repeat(2, 1)).shape == (4, 8)
    with count_launches() as counts, torch.no_grad(), use_backend("triton"):
        model(X)
    assert counts.total() == 2


LOAD = """
import hf_rmsnorm.ops.operators
import sys, torch
x = torch.linspace(-2, 3, 16).view(2, 8)
module = torch.export.load(sys.argv[1]).module()
print(module(x.repeat(2, 1))[2:].tolist())
"""


@pytest.mark.full
def test_a_file_with_the_operator_loads_once_the_operators_are_imported(tmp_path):
    model, expected = norms()
    with use_backend("triton"), torch.no_grad():
        program = torch.export.export(model, (X,), dynamic_shapes=ANY_ROWS)
    assert "hf_rmsnorm.norm_forward.default" in operators(program)
    torch.export.save(program, tmp_path / "norms.pt2")
    loaded = json.loads(python("-c", LOAD, tmp_path / "norms.pt2"))
    torch.testing.assert_close(torch.tensor(loaded), expected)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_onnx_has_what_the_unpatched_model_has(family, tmp_path):
    pytest.importorskip("onnxscript", reason="torch.onnx.export asks for it")
    model = tiny_models.build(family)
    ids = tiny_models.token_ids()
    options = {"kwargs": {"use_cache": False}, "dynamo": True, "verbose": False}

    def nodes():
        program = torch.onnx.export(model, (ids,), **options)
        return [node.op_type for node in program.model.graph]

    expected = nodes()
    patch_model(model)
    assert nodes() == expected and "MatMul" in expected
