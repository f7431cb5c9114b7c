"""`inspect_norms` and `hf-rmsnorm inspect`: the mean of every norm's input, and the
price of a naive swap.
"""

import copy
import json
import math

import pytest
import tiny_models
import torch
from torch import nn

from hf_rmsnorm.cli.main import main
from hf_rmsnorm.verification import inspect_norms


class PlainRMS(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x):
        return (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
            + self.bias
        )


@pytest.fixture
def gpt2():
    torch.manual_seed(0)
    model = tiny_models.build("gpt2").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln_" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape))
        model.transformer.wte.weight.add_(0.5)  # a stream with a mean
    return model


IDS = torch.arange(3, 35).view(2, 16)


def test_the_mean_of_each_input_is_measured(gpt2):
    seen = {}
    handles = [
        m.register_forward_pre_hook(
            lambda _, args, path=p: seen.setdefault(path, args[0])
        )
        for p, m in gpt2.named_modules()
        if isinstance(m, nn.LayerNorm)
    ]
    with torch.no_grad():
        gpt2(input_ids=IDS)
    for handle in handles:
        handle.remove()
    inspection = inspect_norms(gpt2, IDS)
    assert [norm.path for norm in inspection.norms] == list(seen)
    for norm in inspection.norms:
        x = seen[norm.path].double().flatten(0, 1)
        ratio = x.mean(-1).abs() / x.square().mean(-1).sqrt()
        assert norm.centered and norm.rows == 32
        assert norm.median == pytest.approx(ratio.median().item(), rel=1e-12)
        assert norm.largest == pytest.approx(ratio.max().item(), rel=1e-12)
    assert inspection.norms[0].median > 0.1


def test_the_naive_swap_is_the_model_with_its_layer_norms_replaced(gpt2):
    inspection = inspect_norms(gpt2, IDS)
    swapped = copy.deepcopy(gpt2)
    for path, module in list(swapped.named_modules()):
        if isinstance(module, nn.LayerNorm):
            parent, _, name = path.rpartition(".")
            setattr(swapped.get_submodule(parent), name, PlainRMS(module))
    with torch.no_grad():
        logits, others = (
            gpt2(input_ids=IDS).logits.double(),
            swapped(input_ids=IDS).logits.double(),
        )
    kl = (
        nn.functional.kl_div(
            others.log_softmax(-1),
            logits.log_softmax(-1),
            log_target=True,
            reduction="sum",
        )
        / 32
    )
    assert inspection.naive.kl == pytest.approx(kl.item(), rel=1e-4)
    loss = nn.functional.cross_entropy(
        others[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()
    )
    assert inspection.naive.perplexity == pytest.approx(math.exp(loss.item()), rel=1e-4)
    assert inspection.naive.kl > 1e-4


def test_the_model_is_left_as_it_was(gpt2):
    gpt2.train()
    gpt2.transformer.h[0].eval()
    training = [m.training for m in gpt2.modules()]
    before = {k: v.clone() for k, v in gpt2.state_dict().items()}
    types = [type(m) for m in gpt2.modules()]
    inspect_norms(gpt2, {"input_ids": IDS})
    assert [m.training for m in gpt2.modules()] == training and [
        type(m) for m in gpt2.modules()
    ] == types
    assert all(torch.equal(v, before[k]) for k, v in gpt2.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in gpt2.modules())


def test_a_model_of_rms_norms_has_no_naive_swap():
    inspection = inspect_norms(tiny_models.build("llama"), IDS)
    assert inspection.naive is None and inspection.norms and inspection.perplexity > 1
    assert not any(norm.centered for norm in inspection.norms)


@pytest.mark.full
def test_the_command_prints_and_compares(capsys):
    arguments = ["inspect", "demo:gpt2", "--max-tokens", "64", "--after", "demo:gpt2"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    said = "merely replaced by RMSNorm would change perplexity"
    assert "transformer.h.0.ln_1" in text and said in " ".join(text.split())
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["naive"]["kl"] > 0 and data["after"]["norms"] == data["norms"]


def test_a_text_that_cannot_be_read_is_one_line(capsys):
    assert main(["inspect", "demo:gpt2", "--text", "no such file"]) == 2
    error = capsys.readouterr().err
    assert "cannot read" in error and error.count("\n") == 1
