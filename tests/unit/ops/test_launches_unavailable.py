"""A kernel that cannot be compiled or loaded: one warning with the cause and the cure,
and then plain torch.
"""

import errno
import subprocess

import pages
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hf_rmsnorm import patch_model, rms_norm, settings, use_backend
from hf_rmsnorm.kernels import failure
from hf_rmsnorm.ops import backend, launches, runs_on
from hf_rmsnorm.ops.backend import device_refusal
from hf_rmsnorm.ops.launches import forget_launches

pytestmark = pytest.mark.skipif(
    device_refusal("cpu") is not None, reason="needs TRITON_INTERPRET=1"
)
if device_refusal("cpu") is None:
    from triton.runtime.errors import InterpreterError, OutOfResources, PTXASError

    from hf_rmsnorm.kernels.compiled import Kernel
else:
    InterpreterError = OutOfResources = PTXASError = lambda *_: None

NO_COMPILER = "Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl."
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "vocab_size": 64,
}  # fmt: skip
IDS = torch.tensor([[1, 2, 3]])


@pytest.fixture
def fail(monkeypatch):
    """``fail(error, word)``: from now on each kernel whose name holds the word raises;
    the names of those that did.
    """
    real = Kernel.load

    def start(error, word=""):
        tried = []

        def load(self, *args):
            if word not in self.name:
                return real(self, *args)
            tried.append(self.name)
            raise error

        monkeypatch.setattr(Kernel, "load", load)
        forget_launches()
        return tried

    yield start
    for state in (failure.failed_devices, launches.left_devices):
        state.clear()
    forget_launches()


def llama():
    return LlamaForCausalLM(LlamaConfig(**SMALL))


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8))


def step(model):
    """The logits of a training step, and all gradients."""
    model.zero_grad()
    made = model(input_ids=IDS, labels=IDS)
    made.loss.backward()
    return made.logits.detach(), [p.grad.clone() for p in model.parameters()]


def alike(made, wanted):
    logits, gradients = made
    wanted_logits, wanted_gradients = wanted
    if not torch.equal(logits, wanted_logits):
        return False
    return all(map(torch.equal, gradients, wanted_gradients))


def no_file(path):
    return FileNotFoundError(errno.ENOENT, "No such file", path)


def denied(path):
    return PermissionError(errno.EACCES, "Permission denied", path)


FULL = OSError(errno.ENOSPC, "No space left on device")
GCC = subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"])
NO_PYTHON = "main.c:2: fatal error: Python.h: No such file"
NO_IMAGE = "Triton Error [CUDA]: device kernel image is invalid"
CACHE = "TRITON_CACHE_DIR="
PTXAS = "TRITON_PTXAS_PATH="
CURES = [
    (RuntimeError(NO_COMPILER), "Failed to find C compiler", "CC="),
    (GCC, "/usr/bin/gcc ended with exit code 1", "CC="),
    (RuntimeError(NO_PYTHON), "Python.h", "python3-dev"),
    (no_file("/c/norm.cubin"), "/c/norm.cubin", CACHE),
    (no_file("/opt/gcc"), "/opt/gcc", "CC="),
    (denied("/root/.triton"), "/root/.triton", CACHE),
    (FULL, "No space left", CACHE),
    (denied("/home/cc/.triton"), "/home/cc", CACHE),
    (RuntimeError("Cannot find ptxas"), "ptxas", PTXAS),
    (PTXASError("Internal Triton PTX codegen error"), "PTXASError", PTXAS),
    (OutOfResources(3, 2, "shared memory"), "shared memory", "hf-rmsnorm env"),
    (OSError("could not get source code"), "could not get", "with its .py files"),
    (RuntimeError(NO_IMAGE), "kernel image", "hf-rmsnorm env"),
]


@pytest.mark.parametrize("error, cause, cure", CURES)
def test_one_warning_has_the_cause_and_the_cure(error, cause, cure, fail):
    x = torch.randn(2, 8)
    weight = torch.rand(8)
    wanted = rms_norm(x.double(), weight.double()).float()
    tried = fail(error)
    with pytest.warns(UserWarning) as seen:
        made = [rms_norm(x, weight) for _ in range(2)]
    first, *rest = str(seen[0].message).splitlines()
    assert len(seen) == 1
    assert first.startswith("hf_rmsnorm: ")
    assert cause in first
    assert cure in " ".join(rest)
    for y in made:
        assert torch.allclose(y, wanted)
    assert len(tried) == 1
    where = runs_on("cpu")
    assert where["backend"] == "original"
    assert cause in where["reason"]
    assert cure in where["reason"]


def test_the_warning_is_as_shown(fail):
    fail(RuntimeError(NO_COMPILER))
    with pytest.warns(UserWarning) as seen:
        rms_norm(torch.randn(2, 8), torch.ones(8))
    printed = str(seen[0].message).replace("On cpu ", "On cuda:0 ") + "\n"
    shown = pages.shown_behind("docs/troubleshooting.md", "and the model goes on:")
    assert pages.is_as_shown(shown, printed), printed


WORDS = [
    (RuntimeError(NO_COMPILER), ""),
    (denied("/root"), "backward"),
    (FULL, "reduce"),
]


@pytest.mark.parametrize("error, word", WORDS)
@pytest.mark.parametrize("make", [llama, qwen3])
def test_a_model_trains_as_if_it_were_not_patched(make, error, word, fail):
    model = make()
    wanted = step(model)
    assert patch_model(model).layers[0].fused
    tried = fail(error, word)
    with pytest.warns(UserWarning, match="hf_rmsnorm") as seen:
        first = step(model)
    assert len(seen) == 1
    assert tried
    assert len(tried) == len(set(tried))  # each once
    times = len(tried)
    for a, b in zip(first[1], wanted[1], strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert word or alike(first, wanted)
    # its own forward, from the end of that backward on
    assert alike(step(model), wanted)
    assert len(tried) == times


def test_a_checkpoint_runs_its_forward_again_as_it_was(fail):
    norms = nn.ModuleList()
    for _ in range(3):
        norms.append(nn.RMSNorm(8, eps=1e-6))
    patch_model(norms)
    fail(no_file("/c/norm.cubin"), "backward")
    x = y = torch.randn(2, 8, requires_grad=True)
    for norm in norms:
        y = checkpoint(lambda x, norm=norm: norm(x) * 2, y, use_reentrant=False)
    with pytest.warns(UserWarning, match="TRITON_CACHE_DIR"):
        y.sum().backward()
    assert runs_on("cpu")["backend"] == "original"
    assert x.grad is not None


def test_the_triton_backend_raises_the_same_words(fail):
    x = torch.randn(2, 8, requires_grad=True)
    tried = fail(RuntimeError(NO_COMPILER), "backward")
    words = "cannot be compiled here: Failed to find C(.|\n)*CC="
    with use_backend("triton"), pytest.raises(RuntimeError, match=words):
        rms_norm(x, torch.ones(8)).sum().backward()
    with pytest.warns(UserWarning, match="Failed to find C"):
        rms_norm(x, torch.ones(8)).sum().backward()
    assert len(tried) == 2
    with use_backend("triton"), pytest.raises(RuntimeError, match=words):
        rms_norm(x, torch.ones(8))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError(
            "Triton Error [CUDA]: operation not permitted when stream is capturing"
        ),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        InterpreterError("IndexError()"),
        KeyboardInterrupt(),
    ],
)
def test_another_error_is_raised_as_it_is(error, fail, recwarn):
    fail(error)
    with pytest.raises(type(error)) as raised:
        rms_norm(torch.randn(2, 8), torch.ones(8))
    assert raised.value is error
    assert not recwarn
    assert runs_on("cpu")["backend"] == "triton"


def test_the_error_of_a_hook_is_raised_as_it_is(fail, recwarn):
    def hook(*_):
        raise no_file("the user's own")

    norms = nn.Sequential(nn.RMSNorm(8, eps=1e-6))
    patch_model(norms)
    norms[0].register_forward_hook(hook)
    with pytest.raises(FileNotFoundError, match="the user's own"):
        norms(torch.randn(2, 8))
    assert not recwarn
    assert runs_on("cpu")["backend"] == "triton"


def test_only_the_device_that_fails_is_left(fail, monkeypatch):
    monkeypatch.setattr(backend, "_device_refusal", lambda *_: None)
    fail(RuntimeError(NO_COMPILER))
    with pytest.warns(UserWarning, match="On cpu"):
        rms_norm(torch.ones(2, 8), torch.ones(8))
    assert runs_on("cpu")["backend"] == "original"
    assert runs_on("cuda:1")["backend"] == "triton"


@pytest.mark.parametrize("word", ["", "backward"])
def test_a_compiled_graph_of_operators_goes_on_in_plain_torch(word, fail, monkeypatch):
    monkeypatch.setattr(settings, "while_compiling", "operator")
    norm = nn.RMSNorm(8, eps=1e-6)
    model = nn.Sequential(norm, nn.Linear(8, 8), nn.LayerNorm(8))
    x = torch.randn(2, 8)
    model(x).square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    patch_model(model)
    fail(RuntimeError(NO_COMPILER), word)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="hf_rmsnorm") as seen:
        for _ in range(2):
            model.zero_grad()
            compiled(x).square().sum().backward()
    texts = [str(warning.message) for warning in seen]
    assert sum("hf_rmsnorm" in text for text in texts) == 1
    for p, w in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(p.grad, w, atol=1e-5)
