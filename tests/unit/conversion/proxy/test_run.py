"""A proxy runs in float64 throughout."""

import torch
from conversion_models import config_of

from hf_rmsnorm.conversion.proxy.model import make_proxy
from hf_rmsnorm.conversion.proxy.run import run


def test_the_proxy_computes_all_of_it_in_float64():
    """A rotary table and a softmax that the class computes in float32 would leave 1e-8
    here.
    """
    proxy = make_proxy(config_of("gpt_neox"))
    (logits,) = run(proxy.model, proxy.inputs)
    with torch.no_grad():
        # a ratio: the stream's mean moves and nothing else
        proxy.model.get_input_embeddings().weight.add_(1.0)
    (moved,) = run(proxy.model, proxy.inputs)
    assert 0 < (logits - moved).abs().max() <= 5e-12 * logits.abs().max()
    assert logits.dtype == torch.float64
