"""Checkpoints of a training run that outlive a kill, the same for one process, DDP,
FSDP2 and DeepSpeed.
"""

import json
import shutil

import torch
from accelerate.utils import DistributedType
from refusals import writing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

NAME = "checkpoint-{}"
# on process 0, whatever the model is wrapped in
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_model(accelerator, model, folder):
    """An ordinary checkpoint: patched or not, the same keys, class names and bytes."""
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    weights = (
        accelerator.get_state_dict(model)
        if deepspeed
        else get_model_state_dict(model, options=WHOLE)
    )
    if accelerator.is_main_process:
        with writing(folder):
            accelerator.unwrap_model(model).save_pretrained(folder, state_dict=weights)


def save_checkpoint(accelerator, model, optimizer, folder, run):
    """Write all that a run needs to go on. The folder appears by one rename, whole: a
    kill leaves the one before.
    """
    staging, replaced = folder.with_suffix(".partial"), folder.with_suffix(".replaced")
    if accelerator.is_main_process:
        for leftover in (staging, replaced):
            # of a run that was killed; mostly there is none
            shutil.rmtree(leftover, ignore_errors=True)
    accelerator.wait_for_everyone()
    save_model(accelerator, model, staging)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.save_state(staging / "state")
    else:
        state = get_optimizer_state_dict(model, optimizer.optimizer, options=WHOLE)
        if accelerator.is_main_process:
            with writing(staging):
                torch.save(state, staging / "optimizer.pt")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with writing(folder):
            (staging / "run.json").write_text(json.dumps(run) + "\n", encoding="utf-8")
            if folder.exists():
                folder.rename(replaced)
            staging.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    accelerator.wait_for_everyone()


def load_optimizer(accelerator, model, optimizer, checkpoint):
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.load_state(checkpoint / "state")
    else:
        state = torch.load(checkpoint / "optimizer.pt", weights_only=True)
        set_optimizer_state_dict(model, optimizer.optimizer, state, options=WHOLE)
