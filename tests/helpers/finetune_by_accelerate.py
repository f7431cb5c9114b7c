"""examples/finetune.py with its model sharded by accelerate, as on GPUs: a script for `accelerate launch`.

accelerate serves FSDP on accelerators alone. Told that these processes are on some, it goes the same way on a CPU.
"""

import os
import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from places import EXAMPLES

sys.path.insert(0, str(EXAMPLES))

import finetune  # noqa: E402


def told_of_accelerators(real=finetune.Accelerator, **options):
    accelerator = real(**options)
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"  # as the config says: process 0 alone reads the weights
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    for state in (accelerator.state.__dict__, PartialState._shared_state):
        state["distributed_type"] = DistributedType.FSDP
    return accelerator


finetune.Accelerator = told_of_accelerators
finetune.fully_shard = None  # is not to be called
finetune.main()
