"""`torch.compile` of a patched model traces the model's own code, unless it is asked to
keep the kernels.
"""

import shutil

import pytest
import tiny_models
import torch
from torch.fx.node import map_arg
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_rmsnorm import patch_model, settings
from scripts.coverage import diffusers_models

FAMILIES = ["llama", "gpt2", "gemma3_text", "olmo2", "mixtral", "phi3", "qwen3"]


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
            numbers = {
                node: f"%{number}" for number, node in enumerate(graph.graph.nodes)
            }
            for node in numbers:
                target = "" if node.op == "placeholder" else node.target
                arguments = map_arg((node.args, node.kwargs), numbers.__getitem__)
                lines.append(f"{node.op} {target} {arguments}")
        return lines

    def operators(self) -> int:
        """How many nodes are operators of this package."""
        return sum(
            str(node.target).startswith("hf_rmsnorm.")
            for graph in self
            for node in graph.graph.nodes
        )


def build(family, dtype=torch.float32):
    """One layer is enough of a graph."""
    size = {"n_layer" if family == "gpt2" else "num_hidden_layers": 1}
    return tiny_models.build(family, dtype, **size)


def compiled_nodes(model, run, **options) -> list[str]:
    torch.compiler.reset()
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs, **options)
    run(compiled)
    assert len(graphs) == 1
    return graphs.nodes()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_of_a_patched_model_is_the_graph_of_the_unpatched_one(family):
    model = build(family, torch.bfloat16)

    def run(compiled):
        compiled(tiny_models.token_ids(), use_cache=False)

    expected = compiled_nodes(model, run)
    patch_model(model)
    assert compiled_nodes(model, run) == expected


@pytest.mark.full
def test_so_is_the_graph_for_any_batch_size():
    model = build("llama", torch.bfloat16)

    def run(compiled):
        for batch in (2, 3):
            compiled(tiny_models.token_ids(batch), use_cache=False)

    expected = compiled_nodes(model, run, dynamic=True)
    patch_model(model)
    assert compiled_nodes(model, run, dynamic=True) == expected


@pytest.mark.parametrize(
    "name",
    [
        "FluxTransformer2DModel",
        pytest.param("DiTTransformer2DModel", marks=pytest.mark.nightly),
    ],
)
def test_so_is_the_graph_of_a_diffusion_model(name):
    pytest.importorskip("diffusers")
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
        model(tiny_models.token_ids(), use_cache=False)
        return graphs.nodes()

    model = tiny_models.build("qwen3", torch.bfloat16)
    expected = nodes(model)
    patch_model(model)
    assert nodes(model) == expected


@pytest.mark.nightly
@pytest.mark.skipif(
    not shutil.which("g++"), reason="Inductor needs a C++ compiler for a CPU"
)
def test_a_compiler_gives_the_same_bits_before_and_after_the_patch():
    model = build("llama", torch.bfloat16)
    ids = tiny_models.token_ids()
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        expected = compiled(ids, use_cache=False).logits
        patch_model(model)
        assert torch.equal(compiled(ids, use_cache=False).logits, expected)


@pytest.mark.full
def test_no_graph_break_and_no_recompile_over_batch_sizes():
    settings.while_compiling = "operator"
    model = build("qwen3")
    patch_model(model)
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    with torch.no_grad():
        for batch, tokens in ((2, 6), (3, 6), (5, 9)):
            ids = tiny_models.token_ids(batch, tokens)
            torch.testing.assert_close(
                compiled(ids, use_cache=False).logits,
                model(ids, use_cache=False).logits,
            )
    assert len(graphs) == 1


@pytest.mark.full
def test_training_compiles_once_too():
    settings.while_compiling = "operator"
    model = build("llama").train()
    patch_model(model)
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)

    def step(function, ids):
        model.zero_grad()
        function(ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    for batch in (2, 3):
        ids = tiny_models.token_ids(batch, 6)
        got, expected = step(compiled, ids), step(model, ids)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert len(graphs) == 1


def gradients(function, x, weight) -> list[torch.Tensor]:
    x.grad = weight.grad = None
    function(x, x).float().square().sum().backward()
    return [x.grad.clone(), weight.grad.clone()]


@pytest.mark.parametrize("choice", ["original", "operator"])
@pytest.mark.parametrize("used", ["one tensor given twice", "one norm used twice"])
def test_what_is_used_twice_has_the_gradients_of_eager(choice, used):
    settings.while_compiling = choice
    model = torch.nn.Sequential(LlamaRMSNorm(64)).to(torch.bfloat16)
    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)

    def of_one_tensor(a, b):
        return model(a) + 2 * model(b)

    def of_one_norm(a, b):
        return model(3 * model(a))

    function = of_one_tensor if used == "one tensor given twice" else of_one_norm
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    weight = model[0].weight
    unpatched = gradients(function, x, weight)
    patch_model(model)
    patched = gradients(function, x, weight)
    expected = unpatched if choice == "original" else patched
    assert all(map(torch.equal, gradients(compiled, x, weight), expected))


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
@pytest.mark.parametrize(
    "choice", ["operator", pytest.param("original", marks=pytest.mark.nightly)]
)
def test_a_static_cache_decodes_the_same_tokens_compiled(choice):
    settings.while_compiling = choice
    model = build("qwen3")
    ids = tiny_models.token_ids(1, 6)
    how = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **how)
    patch_model(model)
    graphs = Graphs()
    model.forward = torch.compile(model.forward, fullgraph=True, backend=graphs)
    assert torch.equal(
        model.generate(ids, cache_implementation="static", disable_compile=True, **how),
        expected,
    )
    assert len(graphs) == 2, "one for the prompt, one for every token"
