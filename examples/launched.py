"""What `accelerate launch` was asked for, beside what runs: a script asked to train on
two GPUs must not train on one.

`accelerate launch --cpu --num_processes 2` starts one process, and a config that asks
for FSDP is not heeded on a CPU, both without a word. The launcher is a parent of this
process, so that its command line says what it was asked for.
"""

import os
from pathlib import Path
from typing import NamedTuple

import psutil
from accelerate.commands.config.config_args import (
    default_config_file,
    load_config_from_file,
)
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

LAUNCHERS = ("accelerate-launch", "accelerate.commands.launch")
CLIS = ("accelerate", "accelerate.commands.accelerate_cli")


class Launch(NamedTuple):
    """`processes` in all, and `wrapper`: "FSDP1", "FSDP2", "DeepSpeed ZeRO-3" or "";
    None where nothing was said.
    """

    processes: int | None = None
    wrapper: str | None = None


def launch_arguments(command: list[str]) -> list[str] | None:
    """What stands behind `accelerate launch` in a command line; None if that is another
    command's.
    """
    for i, word in enumerate(command):
        name = Path(word).name.removesuffix(".exe")
        if name in LAUNCHERS:
            return command[i + 1 :]
        if name in CLIS and command[i + 1 : i + 2] == ["launch"]:
            return command[i + 2 :]
    return None


def requested() -> Launch:
    """What the launcher among the parents of this process was asked for, by its flags
    or by its config file.
    """
    arguments = None
    try:
        for parent in psutil.Process().parents():
            arguments = launch_arguments(parent.cmdline())
            if arguments is not None:
                break
    except psutil.Error:
        # another user's process: what it was asked for is not ours to read
        pass
    if arguments is None:  # torchrun, or python alone
        return Launch(int(os.environ.get("WORLD_SIZE", 1)))
    args = launch_command_parser().parse_args(arguments)
    config = None
    if args.config_file or (os.path.isfile(default_config_file) and not args.cpu):
        config = load_config_from_file(args.config_file)
    kind, fsdp, deepspeed = (config and config.distributed_type), {}, {}
    if config:
        fsdp, deepspeed = config.fsdp_config, config.deepspeed_config
    wrapper = None
    if args.use_fsdp or kind == DistributedType.FSDP:
        wrapper = (
            f"FSDP{args.fsdp_version if args.use_fsdp else fsdp.get('fsdp_version', 1)}"
        )
    elif args.use_deepspeed or kind == DistributedType.DEEPSPEED:
        wrapper = f"DeepSpeed ZeRO-{args.zero_stage or deepspeed.get('zero_stage', 2)}"
    return Launch(
        args.num_processes or (config.num_processes if config else None), wrapper
    )


def running(accelerator, model) -> Launch:
    """How many processes train together, and what the prepared model was wrapped in."""
    wrapper = ""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        wrapper = f"DeepSpeed ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}"
    elif isinstance(model, FSDPModule):
        wrapper = "FSDP2"
    elif isinstance(model, FullyShardedDataParallel):
        wrapper = "FSDP1"
    return Launch(accelerator.num_processes, wrapper)
