"""`torch.compile` of a patched model traces the model's own code, unless it is asked to
keep the kernels.
"""

import shutil

import pytest
import tiny_models
import torch
from torch.fx.node import map_arg
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import count_launches, patch_model, settings
from scripts.coverage import diffusers as diffusers_models

FAMILIES = ["llama", "gpt2", "gemma3_text", "mixtral", "qwen3"]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    settings.while_compiling = "original"


class Graphs(list):
    """A backend that runs graphs as they are, and keeps them."""

    def __call__(self, graph, inputs):
        self.append(graph)
        return graph.forward

    def nodes(self) -> list[str]:
        """Every node of every graph, with numbers in the place of names."""
        lines = []
        for graph in self:
            numbers = {}
            for node in graph.graph.nodes:
                arguments = map_arg((node.args, node.kwargs), numbers.__getitem__)
                target = "" if node.op == "placeholder" else node.target
                lines.append(f"{node.op} {target} {arguments}")
                numbers[node] = f"%{len(numbers)}"
        return lines

    def operators(self) -> int:
        """How many nodes are operators of this package."""
        return sum(line.split()[1].startswith("hf_rmsnorm.") for line in self.nodes())


def build(family, dtype=torch.float32):
    """One layer is enough of a graph."""
    return tiny_models.build(family, dtype, num_hidden_layers=1)


def compiled_nodes(model, run, **options) -> list[str]:
    torch.compiler.reset()
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs, **options)
    run(compiled)
    assert len(graphs) == 1
    return graphs.nodes()


def run(compiled):
    compiled(tiny_models.token_ids(), use_cache=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_of_a_patched_model_is_the_graph_of_the_unpatched_one(family):
    model = build(family, torch.bfloat16)
    expected = compiled_nodes(model, run)
    patch_model(model)
    assert compiled_nodes(model, run) == expected


def test_so_is_the_graph_of_a_diffusion_model():
    pytest.importorskip("diffusers")
    name = "FluxTransformer2DModel"
    model, inputs = diffusers_models.build(name, torch.bfloat16)

    def run(compiled):
        compiled(**inputs)

    expected = compiled_nodes(model, run)
    report = patch_model(model)
    assert any(record.fused for record in report.layers)
    assert compiled_nodes(model, run) == expected


@pytest.mark.full
def test_so_are_the_graphs_of_layers_that_are_compiled_one_by_one():
    def nodes(model):
        torch.compiler.reset()
        graphs = Graphs()
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend=graphs)
        run(model)
        return graphs.nodes()

    model = tiny_models.build("qwen3", torch.bfloat16)
    expected = nodes(model)
    patch_model(model)
    assert nodes(model) == expected


@pytest.mark.full
@pytest.mark.skipif(
    not shutil.which("g++"), reason="Inductor needs a C++ compiler for a CPU"
)
def test_inductor_launches_what_eager_launches():
    settings.while_compiling = "operator"
    norm = torch.nn.Sequential(LlamaRMSNorm(64))
    patch_model(norm)
    x = torch.randn(8, 64, requires_grad=True)

    def step(function):
        with count_launches() as launches:
            y = function(x)
            gradients = torch.autograd.grad(y, [x, norm[0].weight], x.detach())
        return launches, [y, *gradients]

    launches, expected = step(norm)
    assert launches["norm_backward"] == 1
    compiled = torch.compile(norm, fullgraph=True)
    again, results = step(compiled)
    assert again == launches
    torch.testing.assert_close(results, expected)


@pytest.mark.full
def test_training_with_operators_compiles_once_for_all_batch_sizes():
    settings.while_compiling = "operator"
    model = build("qwen3").train()
    patch_model(model)
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)

    def step(function, ids):
        model.zero_grad()
        output = function(ids, labels=ids, use_cache=False)
        output.loss.backward()
        return output.logits.detach(), tiny_models.gradients(model)

    for batch, tokens in ((2, 6), (3, 6), (5, 9)):
        ids = tiny_models.token_ids(batch, tokens)
        got = step(compiled, ids)
        expected = step(model, ids)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert len(graphs) == 1


@pytest.mark.parametrize("choice", ["original", "operator"])
def test_a_tensor_and_a_norm_that_are_used_twice_have_the_gradients_of_eager(choice):
    settings.while_compiling = choice
    model = torch.nn.Sequential(LlamaRMSNorm(64)).to(torch.bfloat16)
    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)

    def function(a, b):
        return model(3 * model(a)) + 2 * model(b)

    def gradients(function):
        loss = function(x, x).float().square().sum()
        return torch.autograd.grad(loss, [x, model[0].weight])

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    unpatched = gradients(function)
    patch_model(model)
    patched = gradients(function)
    expected = unpatched if choice == "original" else patched
    assert all(map(torch.equal, gradients(compiled), expected))


@pytest.mark.full
def test_each_norm_may_be_one_operator_with_the_kernels_bits():
    model = build("llama", torch.bfloat16)
    ids = tiny_models.token_ids()
    patch_model(model)
    expected = model(ids, use_cache=False).logits
    for choice, operators in (("operator", 3), ("original", 0), ("operator", 3)):
        settings.while_compiling = choice
        graphs = Graphs()
        compiled = torch.compile(model, fullgraph=True, backend=graphs)
        with torch.no_grad():
            logits = compiled(ids, use_cache=False).logits
        assert graphs.operators() == operators, choice
        assert torch.equal(logits, expected)


@pytest.mark.full
def test_a_static_cache_decodes_the_same_tokens_compiled():
    settings.while_compiling = "operator"
    model = build("qwen3")
    ids = tiny_models.token_ids(1, 6)
    how = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **how)
    patch_model(model)
    graphs = Graphs()
    model.forward = torch.compile(model.forward, fullgraph=True, backend=graphs)
    how |= {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(ids, **how), expected)
    assert len(graphs) == 2, "one for the prompt, one for every token"
