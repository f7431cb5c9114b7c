"""Distil a model whose conversion to RMSNorm is approximate against the original, by
its hidden states.

    python examples/postnorm/convert.py ENCODER converted --text sentences.txt
    accelerate launch examples/distil.py ENCODER converted --text sentences.txt --max-steps 300 --output-dir distilled

Post-norm encoders (BERT, MiniLM) convert by a least-squares fold; this trains what the
fold left over. The text has one example a line. Every tenth line, or ``--held-out
FILE``, is not trained on and says by the cosine of embeddings (the mean over tokens)
how near the student is. What is written is the best of the evaluations, with
``distil.json``; where none beats the converted model, nothing is written, and the last
line says that the conversion is enough.
"""

import json
import math
from pathlib import Path

from refusals import (
    SEED,
    UNREADABLE,
    Parser,
    at_least,
    check_no_model,
    fresh_folder,
    one_line_endings,
    output_folder,
    read_text,
    stopper,
    writing,
)

FOLDER = "distilled"

stop = stopper("distil.py")


def parse_arguments(argv=None):
    parser = Parser(stop, __doc__)
    parser.add_argument("teacher", help="the original: a local folder or a hub id")
    parser.add_argument("student", help="its conversion: a local folder or a hub id")
    parser.add_argument(
        "--text", type=Path, required=True, help="what to train on, one example a line"
    )
    parser.add_argument(
        "--held-out", type=Path, help="what to measure on, one example a line"
    )
    told = f"default {FOLDER}, or {FOLDER}-2 and so on where that is there"
    parser.add_argument("--output-dir", type=Path, help=told)
    parser.add_argument("--max-steps", type=at_least(1), default=300)
    parser.add_argument(
        "--batch-size",
        type=at_least(1),
        default=32,
        help="examples per process and step",
    )
    parser.add_argument(
        "--max-length",
        type=at_least(1),
        default=128,
        help="tokens of an example, or as many as the model takes",
    )
    parser.add_argument("--learning-rate", type=at_least(0.0, float), default=1e-6)
    parser.add_argument(
        "--evaluate-every", type=at_least(1), default=100, metavar="N", help="steps"
    )
    parser.add_argument("--seed", type=SEED, default=0)
    parser.add_argument(
        "--cpu", action="store_true", help="train on the CPU though there is a GPU"
    )
    args = parser.parse_args(argv)
    if args.output_dir is not None:
        check_no_model(stop, args.output_dir)
    args.lines = read_lines(args.text)
    args.measured_lines = read_lines(args.held_out) if args.held_out else None
    return args


def read_lines(path):
    return [line for line in read_text(stop, path, path).splitlines() if line.strip()]


# what is wrong is told before torch is imported
ARGUMENTS = parse_arguments() if __name__ == "__main__" else None

import launched
import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    broadcast_object_list,
    set_seed,
)
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer, get_cosine_schedule_with_warmup
from transformers.utils import logging

from hf_rmsnorm import patch_model


def load(kind, name, **options):
    try:
        return kind.from_pretrained(name, **options)
    except UNREADABLE as error:
        stop(f"cannot load {name}: {error}")


def check(args, teacher, student, tokenizer, text):
    """Stop where the two are not of one shape, or the tokenizer does not fit."""
    for name in (
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "vocab_size",
        "max_position_embeddings",
    ):
        theirs, its = (
            getattr(model.config, name, None) for model in (teacher, student)
        )
        if its != theirs:
            stop(
                f"{args.student} is no conversion of {args.teacher}: its {name} is {its}, not {theirs}"
            )
    if tokenizer.pad_token is None:
        stop(
            f"the tokenizer of {args.teacher} has no token to pad with: set its pad_token and save it"
        )
    if set(tokenizer(text).input_ids) <= set(tokenizer.all_special_ids):
        stop(
            f"the tokenizer of {args.teacher} knows no word of the text: are its files there?"
        )


@torch.no_grad()
def embeddings(model, batches):
    """(examples, hidden_size), of length one."""
    rows = []
    for batch in batches:
        hidden, mask = (
            model(**batch).last_hidden_state,
            batch["attention_mask"].unsqueeze(-1),
        )
        rows.append(
            torch.nn.functional.normalize((hidden.double() * mask).sum(1), dim=-1)
        )
    return torch.cat(rows)


def nearness(expected, got):
    cosines = (expected * got).sum(-1)
    return {"cosine_mean": cosines.mean().item(), "cosine_min": cosines.min().item()}


def relative_error(got, expected, mask):
    """The squared error of the tokens' hidden states over their squared norm."""
    mask = mask.unsqueeze(-1)
    return ((got - expected).square() * mask).sum() / (expected.square() * mask).sum()


def main(argv=None):
    args = ARGUMENTS or parse_arguments(argv)
    logging.disable_progress_bar()
    with one_line_endings(stop, "distil.py: interrupted; nothing is written"):
        distil(args)


def distil(args):
    lines, held_out = args.lines, args.measured_lines
    if held_out is None:
        lines, held_out = [line for i, line in enumerate(lines) if i % 10], lines[::10]
    if not held_out:
        stop(f"{args.held_out or args.text} has no line to measure on")
    # An encoder's pooler has no part in the hidden states, so that DDP must not wait
    # for its gradients.
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(
        cpu=args.cpu or not torch.accelerator.is_available(), kwargs_handlers=[unused]
    )
    asked = launched.requested()
    if (
        asked.processes
        and asked.processes > 0
        and asked.processes != accelerator.num_processes
    ):
        stop(f"{asked.processes} processes were asked for, {accelerator.num_processes} started: `accelerate launch "
             "--multi_gpu --num_processes N examples/distil.py ... --cpu` starts N on a CPU")  # fmt: skip
    if args.output_dir is None:
        # the main process chooses: one that looks later would find its folder taken
        chosen = broadcast_object_list([str(fresh_folder(FOLDER))])
        args.output_dir = Path(chosen[0])
    batch = args.batch_size * accelerator.num_processes
    if len(lines) < batch:
        stop(
            f"{args.text} has {len(lines)} lines to train on, fewer than one batch of {batch} (--batch-size)"
        )
    set_seed(args.seed)
    # eval: dropout would be an error to fit
    teacher, student = (
        load(AutoModel, name, dtype=torch.float32).eval()
        for name in (args.teacher, args.student)
    )
    tokenizer = load(AutoTokenizer, args.teacher)
    check(args, teacher, student, tokenizer, held_out[0])
    report = patch_model(student)
    if not any(norm.converted for norm in report.swapped):
        stop(
            f"no LayerNorm of {args.student} runs as RMSNorm: make it with examples/postnorm/convert.py"
        )
    accelerator.print(report)
    with output_folder(args.output_dir, alone=accelerator.is_main_process):
        train(args, accelerator, teacher, student, tokenizer, lines, held_out)
    accelerator.end_training()


def train(args, accelerator, teacher, student, tokenizer, lines, held_out):
    """Train the student, and write the best of the evaluations if it is nearer than
    what there was.
    """
    positions = (
        getattr(student.config, "max_position_embeddings", None) or args.max_length
    )
    length = min(args.max_length, positions, tokenizer.model_max_length)

    def tokens(texts):
        found = tokenizer(
            texts, padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        return found.to(accelerator.device)

    loader = DataLoader(lines, batch_size=args.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=args.learning_rate, weight_decay=0.0
    )
    schedule = get_cosine_schedule_with_warmup(
        optimizer, args.max_steps // 10, args.max_steps
    )
    student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
    teacher.to(accelerator.device)
    measured = [tokens(held_out[i : i + 64]) for i in range(0, len(held_out), 64)]
    expected = embeddings(teacher, measured)
    start = best = nearness(expected, embeddings(student, measured))
    accelerator.print(f"converted  {start}")

    losses, weights, batches = [], None, iter(())
    bar = tqdm(range(1, args.max_steps + 1), disable=not accelerator.is_main_process)
    for step in bar:
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        inputs = tokens(batch)
        with torch.no_grad():
            goal = teacher(**inputs).last_hidden_state
        loss = relative_error(
            student(**inputs).last_hidden_state, goal, inputs["attention_mask"]
        )
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if not math.isfinite(losses[-1]):
            bar.close()
            stop(
                f"the loss is {losses[-1]} at step {step}, nothing is written: give a smaller --learning-rate"
            )
        if step % args.evaluate_every == 0 or step == args.max_steps:
            now = nearness(expected, embeddings(student, measured))
            accelerator.print(f"step {step}  {now}")
            if now["cosine_mean"] > best["cosine_mean"]:
                best, weights = (
                    now,
                    {
                        k: v.cpu().clone()
                        for k, v in accelerator.get_state_dict(student).items()
                    },
                )

    if weights is None:
        accelerator.print(
            "The conversion is enough: distillation does not come nearer. Nothing is written."
        )
    elif accelerator.is_main_process:
        with writing(args.output_dir, cure="make room, or give another --output-dir"):
            accelerator.unwrap_model(student).save_pretrained(
                args.output_dir, state_dict=weights
            )
            tokenizer.save_pretrained(args.output_dir)
            result = {"converted": start, "distilled": best, "losses": losses}
            (args.output_dir / "distil.json").write_text(
                json.dumps(result) + "\n", encoding="utf-8"
            )
        print(f"distilled  {best}; all is in {args.output_dir}")


if __name__ == "__main__":
    main()
