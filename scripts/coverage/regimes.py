"""Which fused pieces of six tiny models run as kernels in each regime that people run,
and why the others do not.

The kernels run in Triton's interpreter. The regimes of several processes have two, by
gloo. ZeRO-3 is emulated: weights are empty but while their module runs.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, PreTrainedModel, logging

import hf_rmsnorm
from benchmarks.compact import write_result
from benchmarks.tables import markdown
from hf_rmsnorm.cli.env import versions

from . import diffusers, launches
from .runs import WIDTH, chosen, line

RANKS = 2
CPU = torch.device("cpu")
BF16 = torch.bfloat16
PACKAGES = (
    *("torch", "triton", "transformers"),
    *("diffusers", "accelerate", "peft", "bitsandbytes"),
)
_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 128, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_PICTURES = {"image_size": 8, "patch_size": 4}
# name -> (class of Transformers, type of the config, what it has besides)
MODELS = {
    "LLaMA": ("AutoModelForCausalLM", "llama", _SIZES),
    "Qwen3": ("AutoModelForCausalLM", "qwen3", _SIZES),
    "Gemma 3": ("AutoModelForCausalLM", "gemma3_text", _SIZES),
    "BERT": ("AutoModelForMaskedLM", "bert", _SIZES),
    "ViT": ("AutoModelForImageClassification", "vit", _SIZES | _PICTURES),
    "Flux": ("FluxTransformer2DModel", "", {}),
}


@dataclass(frozen=True)
class Regime:
    """How a model is run.

    Args:
        prepare: what is done to the model; it returns the one to call. The patch comes
            after it. `NotImplementedError` where a model has no such regime.
        trains: a backward follows the forward.
        around: of the model; gives the context of the forward.
        ranks: how many processes run it.
    """

    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    trains: bool = True
    around: Callable[[nn.Module], AbstractContextManager] = nullcontext
    dtype: torch.dtype = BF16
    ranks: int = 1


def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict]:
    """(model, arguments of its forward): random, the same each time."""
    kind, model_type, sizes = MODELS[name]
    if not model_type:
        model, inputs = diffusers.build(kind, dtype)
        return model, inputs | {"return_dict": False}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes)
    # `transformers.AutoModelFor...` is found when it is asked for
    classes = importlib.import_module("transformers")
    model = getattr(classes, kind).from_config(config, dtype=dtype)
    if name == "ViT":
        return model.eval(), {"pixel_values": torch.randn(2, 3, 8, 8, dtype=dtype)}
    return model.eval(), {"input_ids": torch.arange(3, 15).reshape(2, 6)}


def blocks(model: nn.Module) -> list[nn.Module]:
    """The layers that a wrapper of a model wraps one by one."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def checkpointing(model: nn.Module) -> nn.Module:
    if isinstance(model, PreTrainedModel):
        model.gradient_checkpointing_enable()
    else:
        model.enable_gradient_checkpointing()
    return model


def lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, inject_adapter_in_model

    modules = model.named_modules()
    linears = [path for path, module in modules if isinstance(module, nn.Linear)]
    return inject_adapter_in_model(LoraConfig(r=4, target_modules=linears), model)


def qlora(model: nn.Module) -> nn.Module:
    """Linears of layers in NF4, the rest in float32, and an adapter."""
    from bitsandbytes.nn import Linear4bit
    from peft import prepare_model_for_kbit_training

    for block in blocks(model):
        for path, linear in list(block.named_modules()):
            if type(linear) is not nn.Linear:
                continue
            shape = (linear.in_features, linear.out_features, linear.bias is not None)
            small = Linear4bit(*shape, compute_dtype=BF16, quant_type="nf4")
            small.load_state_dict(linear.state_dict())
            block.set_submodule(path, small.to(CPU))
    model.is_loaded_in_4bit = True
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return lora(model)


def offloaded(model: nn.Module) -> nn.Module:
    from accelerate import cpu_offload

    return cpu_offload(model, execution_device=CPU)


def mapped(model: nn.Module) -> nn.Module:
    """A map without offload: each module that holds a parameter is hooked."""
    from accelerate import dispatch_model

    return dispatch_model(model, {"": CPU}, main_device=CPU, force_hooks=True)


def zero3(model: nn.Module) -> nn.Module:
    whole = {}

    def gather(module: nn.Module, inputs: tuple) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = whole[parameter]

    def release(module: nn.Module, inputs: tuple = (), output=None) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.new_empty(0)

    hf_rmsnorm.patch_model(model)  # an empty weight tells nothing about its norm
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            whole.setdefault(parameter, parameter.data)
        release(module)
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(release)
    return model


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module) -> nn.Module:
    """The model's own plan, which `from_pretrained(tp_plan="auto")` carries out."""
    if not (isinstance(model, PreTrainedModel) and model._tp_plan):
        raise NotImplementedError
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config = DistributedConfig(tp_plan="auto", tp_size=RANKS)
    plan, _, _ = model._resolve_parallel_plans(config)
    apply_tensor_parallelism(model, init_device_mesh("cpu", (RANKS,)), plan)
    return model


def cached(config: str, **arguments) -> Regime:
    """One of diffusers' caches, in the first step, which fills it."""

    def prepare(model: nn.Module) -> nn.Module:
        if not hasattr(model, "enable_cache"):
            raise NotImplementedError
        hooks = importlib.import_module("diffusers.hooks")
        model.enable_cache(getattr(hooks, config)(**arguments))
        return model

    return Regime(prepare, trains=False, around=lambda model: model.cache_context("c"))


def group_offloaded(model: nn.Module) -> nn.Module:
    if not hasattr(model, "enable_group_offload"):
        raise NotImplementedError
    model.enable_group_offload(CPU, CPU, offload_type="leaf_level")
    return model


REGIMES = {
    "inference": Regime(trains=False),
    "training": Regime(),
    "training under autocast": Regime(
        around=lambda model: torch.autocast("cpu", BF16), dtype=torch.float32
    ),
    "gradient checkpointing": Regime(checkpointing),
    "LoRA": Regime(lora),
    "QLoRA": Regime(qlora, dtype=torch.float32),
    "offload to the CPU": Regime(offloaded, trains=False),
    "a map of several GPUs": Regime(mapped, trains=False),
    "DDP": Regime(DistributedDataParallel, ranks=RANKS),
    "FSDP2": Regime(sharded, ranks=RANKS),
    "ZeRO-3 (forward)": Regime(zero3, trains=False),
    "tensor parallel": Regime(tensor_parallel, trains=False, ranks=RANKS),
    "tensor parallel (training)": Regime(tensor_parallel, ranks=RANKS),
    "torch.compile": Regime(
        functools.partial(torch.compile, backend="eager"), trains=False
    ),
    "first block cache": cached("FirstBlockCacheConfig", threshold=0.2),
    "mag cache": cached(
        "MagCacheConfig", num_inference_steps=4, mag_ratios=torch.ones(4)
    ),
    "group offloading": Regime(group_offloaded, trains=False),
}


def examine(name: str, regime: str) -> dict:
    """The cell of a model and a regime: how many pieces there are, how many ran as
    kernels in all their calls, and the reasons of the others with their number; no
    pieces where the model has no such regime.
    """
    how = REGIMES[regime]
    cell = {"model": name, "regime": regime}
    model, inputs = build(name, how.dtype)
    model.train(how.trains)
    try:
        called = how.prepare(model)
    except NotImplementedError:
        return cell
    report = hf_rmsnorm.patch_model(model)
    with torch.set_grad_enabled(how.trains), hf_rmsnorm.count_launches(model) as ran:
        with how.around(model):
            output = called(**inputs)[0]
        if how.trains:
            output.float().square().mean().backward()
    pieces = ran.pieces
    missed = [piece for piece in pieces if piece.missed or not piece.has_run]
    reasons = Counter(f"{piece.what}: {piece.reason}" for piece in missed)
    norms = {norm.path for norm in report.swapped}
    launched = launches.by_kernels(pieces, norms)
    counts = {"pieces": len(pieces), "ran": len(pieces) - len(missed)}
    return (
        cell
        | counts
        | {"launched": launched}
        | {"reasons": dict(sorted(reasons.items()))}
    )


def examine_safely(name: str, regime: str) -> dict:
    """`examine`; a cell with the error if it raised one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return examine(name, regime)
    except Exception as error:  # whatever stops a regime is its result
        return {"model": name, "regime": regime, "error": line(error)}


def _rank(rank: int, folder: str, name: str, regimes: list[str]) -> None:
    torch.set_num_threads(1)
    how = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": RANKS}
    dist.init_process_group("gloo", **how)
    cells = [examine_safely(name, regime) for regime in regimes]
    if rank == 0:
        Path(folder, "cells.json").write_text(json.dumps(cells), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def in_processes(name: str, regimes: list[str]) -> list[dict]:
    """The cells of a model and regimes of several processes."""
    with tempfile.TemporaryDirectory() as folder:
        how = {"nprocs": RANKS, "start_method": "fork"}
        arguments = (folder, name, regimes)
        torch.multiprocessing.start_processes(_rank, arguments, **how)
        return json.loads(Path(folder, "cells.json").read_text(encoding="utf-8"))


def cells_of(name: str) -> list[dict]:
    """The cells of a model, in the order of `REGIMES`."""
    alone = [regime for regime, how in REGIMES.items() if how.ranks == 1]
    together = [regime for regime, how in REGIMES.items() if how.ranks > 1]
    cells = in_processes(name, together)  # a fork, before anything is compiled here
    cells += [examine_safely(name, regime) for regime in alone]
    return sorted(cells, key=_order)


def _order(cell: dict) -> int:
    return list(REGIMES).index(cell["regime"])


def run(options) -> int:
    """What ``python -m scripts.coverage regimes`` does; returns 1 where a regime raises
    an error, or has another result than the committed one.
    """
    names = chosen(options.only, MODELS)
    expected = {}
    if options.check:
        earlier = json.loads(options.check.read_text(encoding="utf-8"))
        expected = {place(cell): cell for cell in earlier["cells"]}
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    document = {"versions": versions(PACKAGES), "cells": []}
    code = 0
    for name in names:
        print(name, file=sys.stderr, flush=True)
        for cell in cells_of(name):
            document["cells"].append(cell)
            before = expected.get(place(cell), {}) if options.check else cell
            if before != cell or "error" in cell:
                code = 1
                print(f"now {cell}, before {before}", file=sys.stderr)
    if options.out:
        write_result(options.out, document, WIDTH)
    print("\n".join(page_tables(document)))
    return code


def place(cell: dict) -> tuple[str, str]:
    return cell["model"], cell["regime"]


def _in_words(cell: dict) -> str:
    if "error" in cell:
        return f"error: {cell['error']}"
    if "pieces" not in cell:
        return ""
    return f"{cell['ran']} of {cell['pieces']}"


def page_tables(document: dict) -> list[str]:
    """The tables for the documentation: a row for each regime, then the reasons."""
    cells = {place(cell): cell for cell in document["cells"]}
    names = list(dict.fromkeys(name for name, _ in cells))
    rows = []
    for regime in REGIMES:
        words = [_in_words(cells.get((name, regime), {})) for name in names]
        rows.append([regime, *words])
    lines = [*markdown(["pieces that ran as kernels", *names], rows), ""]
    rows = []
    for (reason, counts), regimes in _alike(document["cells"]).items():
        what, _, why = reason.partition(": ")
        rows.append([f"{what}: {counts}", why, ", ".join(regimes)])
    return lines + markdown(["did not run", "because", "regimes"], rows)


def _alike(cells: list[dict]) -> dict[tuple[str, str], list[str]]:
    """(reason, models with the number of pieces) -> the regimes in which it is so."""
    models = defaultdict(list)
    for cell in sorted(cells, key=_order):
        for reason, count in cell.get("reasons", {}).items():
            models[cell["regime"], reason].append(f"{cell['model']} {count}")
    alike = defaultdict(list)
    for (regime, reason), counts in models.items():
        alike[reason, ", ".join(counts)].append(regime)
    return alike
