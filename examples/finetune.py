"""Fine-tune a causal language model with fused norms, or without: the losses are the
same.

    accelerate launch examples/finetune.py --model path/or/hub-id --text notes.txt --max-steps 100
    accelerate launch --config_file examples/accelerate/fsdp2.yaml examples/finetune.py --bf16

By default a small LLaMA that is part of the package trains on ``text.txt`` beside this
file (docstrings of hf_rmsnorm, under its licence). ``--output-dir``, by default a fresh
folder, gets the model, its tokenizer, ``losses.json`` with one number per step, and
``losses.png``. A run that was killed goes on with ``--resume`` from its last
checkpoint, to the same losses. Where the launcher did not start what it was asked for,
or an argument is wrong, one line says so and the exit code is 2.
"""

import argparse
import hashlib
import json
import os
import re
from pathlib import Path

from refusals import (
    SEED,
    UNREADABLE,
    Parser,
    at_least,
    check_no_model,
    fresh_folder,
    model_source,
    one_line_endings,
    output_folder,
    read_text,
    stopper,
    writing,
)

BUNDLED = Path(__file__).with_name("text.txt")
FOLDER = "finetuned"

stop = stopper("finetune.py")


def parse_arguments(argv=None):
    parser = Parser(stop, __doc__)
    told = "a local folder, a hub id, or demo:llama, demo:qwen3, demo:gpt2"
    parser.add_argument("--model", type=model_source, default="demo:llama", help=told)
    parser.add_argument(
        "--text", type=Path, default=BUNDLED, help="the text file to train on"
    )
    told = f"default {FOLDER}, or {FOLDER}-2 and so on where that is there; with --resume where the checkpoint is"
    parser.add_argument("--output-dir", type=Path, help=told)
    parser.add_argument(
        "--patch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fuse the norms",
    )
    parser.add_argument(
        "--backend",
        choices=["auto", "triton", "reference"],
        default="auto",
        help="what computes them",
    )
    parser.add_argument(
        "--max-steps", type=at_least(1), default=20, help="optimizer steps in all"
    )
    parser.add_argument(
        "--batch-size",
        type=at_least(1),
        default=4,
        help="blocks per process and forward",
    )
    parser.add_argument(
        "--block-size", type=at_least(2), default=128, help="tokens per block"
    )
    parser.add_argument(
        "--gradient-accumulation",
        type=at_least(1),
        default=1,
        metavar="N",
        help="forwards per step",
    )
    parser.add_argument(
        "--learning-rate",
        type=at_least(0.0, float),
        help="default 1e-4, and 1e-3 with --lora",
    )
    parser.add_argument("--seed", type=SEED, default=0)
    parser.add_argument(
        "--lora",
        action="store_true",
        help="train rank 8 adapters on all linears, not the model",
    )
    parser.add_argument(
        "--bf16",
        action="store_true",
        help="autocast to bfloat16; the weights stay float32",
    )
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument(
        "--save-every",
        type=at_least(0),
        default=100,
        metavar="N",
        help="steps; 0 for no checkpoints",
    )
    parser.add_argument("--resume", nargs="?", const="last", metavar="CHECKPOINT",
                        help="go on from this checkpoint, by default the last one in --output-dir, if any")  # fmt: skip
    parser.add_argument(
        "--fsdp2",
        action="store_true",
        help="fully_shard each layer; for torchrun, without a config",
    )
    parser.add_argument(
        "--cpu", action="store_true", help="train on the CPU though there is a GPU"
    )
    args = parser.parse_args(argv)
    if args.learning_rate is None:
        # adapters begin at no change at all, and learn with more
        args.learning_rate = 1e-3 if args.lora else 1e-4
    if args.output_dir is not None:
        check_output_dir(args)
    args.content = read_text(stop, args.text, f"--text {args.text}")
    return args


def checkpoints(folder):
    return [
        path
        for path in folder.glob("checkpoint-*")
        if path.name.partition("-")[2].isdigit()
    ]


def check_output_dir(args):
    """Stop where --output-dir has what an earlier run wrote, and this one would not go
    on from it.
    """
    if args.output_dir.exists() and not args.output_dir.is_dir():
        stop(f"{args.output_dir} is a file: give another --output-dir")
    saved = checkpoints(args.output_dir)
    if args.resume is None and saved and args.save_every:
        stop(
            f"{args.output_dir} has checkpoints of an earlier run: --resume, or give another --output-dir"
        )
    if args.resume is None or (args.resume == "last" and not saved):
        check_no_model(stop, args.output_dir)


def default_folder(resume):
    """Where a run without --output-dir writes: where the checkpoint is that it goes on
    from, else a fresh folder.
    """
    if resume not in (None, "last"):
        return Path(resume).parent
    earlier = [
        path
        for path in Path().glob(f"{FOLDER}*")
        if re.fullmatch(rf"{FOLDER}(-\d+)?", path.name)
    ]
    started = [path for path in earlier if checkpoints(path)]
    if resume == "last" and started:
        return max(started, key=lambda path: path.stat().st_mtime)
    return fresh_folder(FOLDER)


# what is wrong is told before torch is imported
ARGUMENTS = parse_arguments() if __name__ == "__main__" else None

import launched
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    broadcast_object_list,
    is_deepspeed_available,
    set_seed,
)
from saving import NAME, load_optimizer, save_checkpoint, save_model
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from hf_rmsnorm import patch_model, rms_norm, use_backend


def make_accelerator(args):
    """The accelerator, and which wrapper was asked for; stops where that is not what
    was launched.
    """
    asked = launched.requested()
    wrapper = "FSDP2" if args.fsdp2 else asked.wrapper
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if asked.processes and asked.processes > 0 and asked.processes != processes:
        stop(f"{asked.processes} processes were asked for, {processes} started: `accelerate launch --cpu` starts one, "
             "`accelerate launch --multi_gpu --num_processes N examples/finetune.py --cpu` starts N")  # fmt: skip
    gpus = (
        0
        if args.cpu or not torch.accelerator.is_available()
        else torch.accelerator.device_count()
    )
    if gpus and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > gpus:
        stop(
            f"there are more processes than GPUs here: give the launcher --num_processes {gpus}, or this script --cpu"
        )
    if wrapper == "FSDP2" and "RANK" not in os.environ:
        stop("FSDP2 was asked for, but no process group was started: use `accelerate launch --config_file "
             "examples/accelerate/fsdp2.yaml` without --cpu, or `torchrun --nproc_per_node N`")  # fmt: skip
    if wrapper not in (None, "FSDP2") and not gpus:
        stop(
            f"{wrapper} was asked for, which accelerate serves on a GPU alone; FSDP2 and DDP run on a CPU as well"
        )
    if wrapper and wrapper.startswith("DeepSpeed") and not is_deepspeed_available():
        stop(f"{wrapper} was asked for: pip install deepspeed")
    if not gpus:
        # for on a CPU accelerate does not spread the weights
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    # DeepSpeed reads it there
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(
        args.gradient_accumulation
    )
    # Without cpu=True each process that a launcher starts where there is no GPU would
    # train alone.
    accelerator = Accelerator(
        cpu=not gpus,
        mixed_precision="bf16" if args.bf16 else None,
        gradient_accumulation_steps=args.gradient_accumulation,
    )
    return accelerator, launched.Launch(processes, wrapper)


def read_blocks(args, tokenizer):
    """The text as token ids, (blocks, block size) int64."""
    ids = tokenizer(
        args.content, return_tensors="pt", truncation=False, verbose=False
    ).input_ids[0]
    if len(ids) < args.block_size:
        stop(
            f"--text {args.text} has {len(ids)} tokens, fewer than one block of {args.block_size} (--block-size)"
        )
    return ids[: len(ids) // args.block_size * args.block_size].view(
        -1, args.block_size
    )


def order(blocks, length, seed):
    """Which block comes when: one shuffled epoch after the other. A longer order starts
    as a shorter one does.
    """
    generator, indices = torch.Generator().manual_seed(seed), []
    while len(indices) < length:
        indices += torch.randperm(blocks, generator=generator).tolist()
    return indices[:length]


def agree_on_folder(args, accelerator):
    """Give --output-dir its default. The main process chooses: one that looks later
    would find its folder taken.
    """
    if args.output_dir is not None:
        return
    chosen = broadcast_object_list([str(default_folder(args.resume))])
    args.output_dir = Path(chosen[0])
    accelerator.print(f"No --output-dir: it writes to {args.output_dir}")


def find_checkpoint(args, settings):
    """(folder, its losses) of the checkpoint to go on from; (None, []) to start anew."""
    saved = checkpoints(args.output_dir)
    if args.resume is None or (args.resume == "last" and not saved):
        return None, []
    folder = (
        max(saved, key=lambda p: int(p.name.partition("-")[2]))
        if args.resume == "last"
        else Path(args.resume)
    )
    try:
        run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        made, losses = dict(run["settings"]), [float(loss) for loss in run["losses"]]
    except (OSError, ValueError, TypeError, KeyError):
        stop(f"--resume {folder}: no checkpoint of finetune.py")
    for name, value in settings.items():
        if made.get(name) != value:
            stop(
                f"--resume {folder}: it was made with {name} {made.get(name)}, this run has {value}"
            )
    if len(losses) > args.max_steps:
        stop(
            f"--resume {folder}: it has {len(losses)} steps already, --max-steps is {args.max_steps}"
        )
    return folder, losses


def damaged(checkpoint, error):
    stop(f"--resume {checkpoint}: it is damaged: {error}; --resume another checkpoint")


def load_model(args, checkpoint, largest):
    """The model to train, float32, from the checkpoint if there is one; `largest` is
    the largest token id it gets.
    """
    source = args.model if args.lora or not checkpoint else checkpoint
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    except UNREADABLE as error:
        if source is checkpoint:
            damaged(checkpoint, error)
        stop(f"cannot load --model {args.model}: {error}")
    if getattr(model, "_hf_peft_config_loaded", False):
        stop(
            f"--model {args.model} is an adapter: merge_and_unload it into its base, and save that"
        )
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if rows is not None and rows <= largest:
        stop(
            f"cannot train --model {args.model}: it embeds {rows} tokens, its tokenizer has given the text {largest}"
        )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions and args.block_size > positions:
        stop(
            f"--block-size {args.block_size} is more than the {positions} positions of {args.model}"
        )
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if args.lora:
        try:
            from peft import LoraConfig, PeftModel, get_peft_model
        except ImportError:
            stop("--lora needs peft: pip install peft")
        try:
            if checkpoint:
                model = PeftModel.from_pretrained(model, checkpoint, is_trainable=True)
            else:
                model = get_peft_model(
                    model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
                )
        except UNREADABLE as error:
            if checkpoint:
                damaged(checkpoint, error)
            stop(f"--lora does not fit --model {args.model}: {error}")
    return model.train()


def make_optimizer(model, learning_rate):
    """AdamW that decays matrices and leaves norms and biases alone."""
    groups = [{"params": [], "weight_decay": 0.0}, {"params": [], "weight_decay": 0.01}]
    for parameter in model.parameters():
        if parameter.requires_grad:
            # under ZeRO-3 the parameter itself is empty
            shape = getattr(parameter, "ds_shape", parameter.shape)
            groups[len(shape) >= 2]["params"].append(parameter)
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=learning_rate
    )


def write_losses(losses, folder, name):
    (folder / "losses.json").write_text(
        json.dumps({"losses": losses}) + "\n", encoding="utf-8"
    )
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        print("No losses.png: pip install matplotlib draws it")
        return
    figure = Figure(layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss", title=f"Fine-tuning {name}")
    axes.plot(range(1, len(losses) + 1), losses, marker="." if len(losses) < 50 else "")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(folder / "losses.png")


def main(argv=None):
    args = ARGUMENTS or parse_arguments(argv)
    logging.disable_progress_bar()
    with one_line_endings(
        stop, "finetune.py: interrupted; --resume goes on from the last checkpoint"
    ):
        finetune(args)


def finetune(args):
    accelerator, wanted = make_accelerator(args)
    agree_on_folder(args, accelerator)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    except UNREADABLE as error:
        stop(f"cannot load --model {args.model}: {error}")
    if args.backend == "triton":
        try:
            with use_backend("triton"):
                rms_norm(torch.ones(1, 8, device=accelerator.device))
        except RuntimeError as error:
            stop(
                f"--backend triton: {error}; without it each device is served by what it has"
            )
    if args.text == BUNDLED:
        accelerator.print(
            f"No --text: it trains on {BUNDLED.name} beside this script, docstrings of hf_rmsnorm"
        )
    blocks = read_blocks(args, tokenizer)
    names = (
        "batch_size",
        "block_size",
        "gradient_accumulation",
        "lora",
        "learning_rate",
        "seed",
    )
    settings = {
        "model": Path(os.path.abspath(args.model)).name,
        "tokens": hashlib.sha256(blocks.numpy().tobytes()).hexdigest()[:16],
        "precision": accelerator.mixed_precision,
        "processes": accelerator.num_processes,
        **{name: getattr(args, name) for name in names},
    }
    checkpoint, losses = find_checkpoint(args, settings)
    set_seed(args.seed)  # the same new adapters in all processes
    model = load_model(args, checkpoint, int(blocks.max()))
    with output_folder(args.output_dir, alone=accelerator.is_main_process):
        train(args, accelerator, wanted, model, blocks, settings, checkpoint, losses)
        if accelerator.is_main_process:
            with writing(args.output_dir):
                tokenizer.save_pretrained(args.output_dir)
                write_losses(losses, args.output_dir, settings["model"])
            print(
                f"Loss {losses[0]:.4f} at first and {losses[-1]:.4f} at last; all is in {args.output_dir}"
            )
    accelerator.end_training()


def train(args, accelerator, wanted, model, blocks, settings, checkpoint, losses):
    """Train the model and save it; `losses` gets one number per step."""
    if args.patch:
        report = patch_model(model)
        accelerator.print(report)
    per_step = args.batch_size * args.gradient_accumulation * accelerator.num_processes
    ahead = order(len(blocks), args.max_steps * per_step, args.seed)[
        len(losses) * per_step :
    ]
    loader = DataLoader(blocks, batch_size=args.batch_size, sampler=ahead)
    if (
        wanted.wrapper == "FSDP2"
        and accelerator.distributed_type != DistributedType.FSDP
    ):
        # torchrun --fsdp2, or a CPU, where accelerate would make it DDP without a word
        model.to(accelerator.device)
        for module in [
            m
            for m in model.modules()
            if type(m).__name__ in (model._no_split_modules or ())
        ]:
            fully_shard(module)
        fully_shard(model)
        optimizer, loader = accelerator.prepare(
            make_optimizer(model, args.learning_rate), loader
        )
    else:
        model, optimizer, loader = accelerator.prepare(
            model, make_optimizer(model, args.learning_rate), loader
        )
    runs = launched.running(accelerator, model)
    if runs.processes != wanted.processes or runs.wrapper != (
        wanted.wrapper or runs.wrapper
    ):
        stop(f"{wanted.processes} processes and {wanted.wrapper or 'no wrapper'} were asked for, "
             f"and {runs.processes} with {runs.wrapper or 'none'} train together")  # fmt: skip
    accelerator.print(
        f"{runs.processes} process(es) on {accelerator.device.type}, {runs.wrapper or 'not sharded'}"
    )
    if checkpoint:
        try:
            load_optimizer(accelerator, model, optimizer, checkpoint)
        except Exception as error:  # bytes that are no pickle raise nearly anything
            damaged(
                checkpoint, f"its optimizer's state: {type(error).__name__} {error}"
            )
        accelerator.print(f"Going on from {checkpoint}")

    batches = iter(loader)
    bar = tqdm(
        range(len(losses), args.max_steps), disable=not accelerator.is_main_process
    )
    with use_backend(args.backend):
        for step in bar:
            total = torch.zeros((), device=accelerator.device)
            for micro_step in range(args.gradient_accumulation):
                batch = next(batches)
                # What dropout draws depends on the seed and on which forward this is: a
                # resumed run draws the same.
                forward = (
                    step * args.gradient_accumulation + micro_step
                ) * accelerator.num_processes
                set_seed(args.seed + forward + accelerator.process_index)
                with accelerator.accumulate(model):
                    with accelerator.autocast():
                        loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                total += loss.detach().float() / args.gradient_accumulation
            losses.append(accelerator.reduce(total, "mean").item())
            bar.set_postfix(loss=f"{losses[-1]:.4f}")
            if args.save_every and (step + 1) % args.save_every == 0:
                run = {"settings": settings, "losses": losses}
                save_checkpoint(
                    accelerator,
                    model,
                    optimizer,
                    args.output_dir / NAME.format(step + 1),
                    run,
                )

    save_model(accelerator, model, args.output_dir)


if __name__ == "__main__":
    main()
