"""`torch.compile` of a patched model: no graph breaks, no recompiles, and a choice of what Inductor sees."""

import pytest
import tiny_models
import torch

from hf_rmsnorm import patch_model, settings

FAMILIES = ["llama", "qwen3", "gemma2", "gpt2"]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    settings.while_compiling = "operator"


class Graphs(list):
    """A backend that runs graphs as they are, and keeps them."""

    def __call__(self, graph, inputs):
        self.append(graph)
        return graph.forward

    def operators(self):
        return sum(str(node.target).startswith("hf_rmsnorm.") for graph in self for node in graph.graph.nodes)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_no_graph_break_and_no_recompile_over_batch_sizes(family):
    model = tiny_models.build(family)
    patch_model(model)
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    with torch.no_grad():
        for batch, tokens in ((2, 6), (3, 6), (5, 9), (7, 16), (4, 11)):
            ids = tiny_models.token_ids(batch, tokens)
            torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    assert len(graphs) == 1


@pytest.mark.full
def test_training_compiles_once_too():
    model = tiny_models.build("llama").train()
    patch_model(model)
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    for batch in (2, 3, 5):
        ids = tiny_models.token_ids(batch, 6)
        model.zero_grad()
        compiled(ids, labels=ids, use_cache=False).loss.backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        for a, b in zip(got, (p.grad for p in model.parameters()), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert len(graphs) == 1


@pytest.mark.nightly
def test_what_inductor_sees_is_a_setting():
    model = tiny_models.build("llama")
    ids = tiny_models.token_ids()
    expected = model(ids, use_cache=False).logits
    patch_model(model)
    for choice, operators in (("operator", 5), ("formula", 0), ("operator", 5)):
        settings.while_compiling = choice
        graphs = Graphs()
        with torch.no_grad():
            logits = torch.compile(model, fullgraph=True, backend=graphs)(ids, use_cache=False).logits
        torch.testing.assert_close(logits, expected)
        assert graphs.operators() == operators, choice


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_static_cache_decodes_the_same_tokens_compiled(family):
    model = tiny_models.build(family)
    ids = tiny_models.token_ids(1, 6)
    how = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **how)
    patch_model(model)
    graphs = Graphs()
    model.forward = torch.compile(model.forward, fullgraph=True, backend=graphs)
    assert torch.equal(model.generate(ids, cache_implementation="static", disable_compile=True, **how), expected)
    assert len(graphs) == 2, "one for the prompt, one for every token"
