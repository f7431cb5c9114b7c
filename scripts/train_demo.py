"""Train one of the embedded demo models from nothing, on text that ships with CPython.

    python scripts/train_demo.py --arch llama

Byte-level causal language models of about one million parameters. Training runs in
float32 on the CPU, for as many steps as the committed model; the weights are cast to
the stored dtype at the end. Writes an ordinary checkpoint and ``training.json``, and
prints the latter.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import math
import os
import pydoc_data.topics
import random
import time
from collections.abc import Iterator
from pathlib import Path

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_rmsnorm.cli.env import versions

EOS = "<|endoftext|>"
EOS_ID = 256  # ids 0..255 are the byte values themselves
# also max_position_embeddings: a learned position beyond the training length would be
# noise
SEQ_LEN = 512
BATCH_SIZE = 4  # windows per step
STEPS = {"llama": 2400, "qwen3": 2400, "gpt2": 3409}
HELD_OUT = 0.02  # share of the documents kept for evaluation
# of tokens and of learned positions
TABLES = ("embed_tokens.weight", "wte.weight", "wpe.weight", "lm_head.weight")

# initializer_range: near 1 / sqrt(hidden size), as the usual 0.02 is for wide models
# and learns slowly here
COMMON = {"vocab_size": EOS_ID + 1, "initializer_range": 0.06, "bos_token_id": EOS_ID}
COMMON |= {"eos_token_id": EOS_ID, "pad_token_id": EOS_ID}
ROTARY = COMMON | {"num_attention_heads": 4, "num_key_value_heads": 2}
ROTARY |= {"hidden_size": 128, "intermediate_size": 384}
ROTARY |= {"max_position_embeddings": SEQ_LEN}
LLAMA = {"num_hidden_layers": 5, "head_dim": 32}
QWEN3 = {"num_hidden_layers": 4, "head_dim": 64, "tie_word_embeddings": True}
GPT2 = {"n_embd": 128, "n_layer": 5, "n_head": 4, "n_positions": SEQ_LEN}
GPT2 |= {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {"llama": ROTARY | LLAMA, "qwen3": ROTARY | QWEN3, "gpt2": COMMON | GPT2}


def make_model(arch: str) -> tuple[transformers.PreTrainedModel, torch.dtype]:
    """Return a freshly initialised float32 model and the dtype its weights are stored
    in.
    """
    config = AutoConfig.for_model(arch, **CONFIGS[arch])
    model = AutoModelForCausalLM.from_config(config)
    if arch != "gpt2":
        return model, torch.bfloat16
    # positions start as sinusoids: from random ones it takes 600 steps, not 250, until
    # attention finds the last byte
    angle = torch.outer(torch.arange(SEQ_LEN), 1000 ** (-torch.arange(64) / 64))
    positions = 0.25 * torch.cat([angle.sin(), angle.cos()], dim=1)
    model.transformer.wpe.weight.data.copy_(positions)
    return model, torch.float32


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A BPE over the 256 bytes with no merges: token id = byte value, plus one token
    for end of text and padding.
    """
    vocabulary = {sign: byte for byte, sign in bytes_to_unicode().items()}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    how = {"add_prefix_space": False, "use_regex": False}
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(**how)
    tokenizer.decoder = decoders.ByteLevel()
    how = dict.fromkeys(("bos_token", "eos_token", "pad_token"), EOS)
    how |= {"model_max_length": SEQ_LEN, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **how)


def docstrings(source: Path) -> list[str]:
    tree = ast.parse(source.read_text(encoding="utf-8"))
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, owners)]
    return [doc for doc in map(ast.get_docstring, nodes) if doc]


def read_corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Return (training, held-out) token ids, int64, 1-D: language reference, licence,
    standard library docstrings.

    One document per topic and per module, in an order fixed by a seed, each ended by
    the end-of-text token. Nothing is imported, so the text depends on the CPython
    version alone.
    """
    stdlib = Path(os.__file__).resolve().parent
    documents = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    if (licence := stdlib / "LICENSE.txt").exists():
        documents.append(licence.read_text(encoding="utf-8"))
    left_out = {
        "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings",
        "lib2to3", "__pycache__",
    }  # fmt: skip
    seen: set[str] = set()
    for path in sorted(stdlib.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(stdlib).parts):
            fresh = [doc for doc in dict.fromkeys(docstrings(path)) if doc not in seen]
            seen.update(fresh)
            if fresh:
                documents.append("\n\n".join(fresh))
    documents = [text.strip() + "\n" for text in documents]
    random.Random(0).shuffle(documents)
    split = len(documents) - round(len(documents) * HELD_OUT)

    def encode(texts: list[str]) -> torch.Tensor:
        ids = [i for text in texts for i in (*text.encode("utf-8"), EOS_ID)]
        return torch.tensor(ids)

    return encode(documents[:split]), encode(documents[split:])


def make_optimizers(model: transformers.PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for the rest; vectors have no
    decay, so that norms really train.

    After 500 steps the LLaMA's held-out loss is 1.59 nats per byte with Muon (Jordan et
    al. 2024), with AdamW 1.89.
    """
    tables, vectors, matrices = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif name.endswith(TABLES):
            tables.append(parameter)
        else:
            matrices.append(parameter)
    adam = functools.partial(torch.optim.AdamW, betas=(0.9, 0.95), fused=True)
    how = {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = [
        torch.optim.Muon(matrices, lr=1e-2, **how),
        adam(tables, lr=3e-3, weight_decay=0.1),
        adam(vectors, lr=1e-2, weight_decay=0.0),
    ]
    for optimizer in optimizers:
        optimizer.param_groups[0]["peak_lr"] = optimizer.param_groups[0]["lr"]
    return optimizers


def schedule(progress: float, warmup: float = 0.02) -> float:
    """Linear warm-up, then cosine to zero at ``progress`` 1."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Mean loss in nats per byte over non-overlapping windows."""
    batches = tokens[: len(tokens) // SEQ_LEN * SEQ_LEN].view(-1, SEQ_LEN).split(8)
    total = 0.0
    for batch in batches:
        total += model(input_ids=batch, labels=batch).loss.item() * len(batch)
    return total / sum(map(len, batches))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--arch", required=True, choices=list(STEPS))
    add("--steps", type=int, help="train for so many (default: as the committed model)")
    add("--output", type=Path, help="folder to write (default: the demo's)")
    args = parser.parse_args()
    demo = Path(__file__).resolve().parents[1] / "hf_rmsnorm/demo"
    args.output = args.output or demo / args.arch
    args.steps = args.steps or STEPS[args.arch]
    return args


def batches_of(tokens: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """Overlapping windows in random order; an epoch meets the same byte at four
    positions.
    """
    windows = tokens.unfold(0, SEQ_LEN, SEQ_LEN // 4)  # a view, no copy
    loader = DataLoader(windows, batch_size=BATCH_SIZE, shuffle=True, drop_last=True)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    return itertools.islice(epochs, steps)


def train(model: transformers.PreTrainedModel, tokens: torch.Tensor, steps: int):
    """The loss of each step."""
    optimizers = make_optimizers(model)
    losses = []
    bar = tqdm(batches_of(tokens, steps), total=steps, mininterval=2.0)
    for step, batch in enumerate(bar):
        for group in (optimizer.param_groups[0] for optimizer in optimizers):
            group["lr"] = group["peak_lr"] * schedule(step / steps)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    return losses


def save(model: transformers.PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    # Transformers 4 does not have the name that 5 writes
    config = folder / "tokenizer_config.json"
    text = config.read_text(encoding="utf-8")
    text = text.replace("TokenizersBackend", "PreTrainedTokenizerFast")
    config.write_text(text, encoding="utf-8")


def main() -> None:
    args = parse_args()
    transformers.set_seed(0)
    tokens, held_out = read_corpus()
    model, stored_dtype = make_model(args.arch)
    start = time.monotonic()
    losses = train(model, tokens, args.steps)
    seconds = time.monotonic() - start
    save(model.to(stored_dtype), args.output)
    # the stored values
    saved = AutoModelForCausalLM.from_pretrained(args.output, dtype=torch.float32)
    last = losses[-50:]
    result = {
        "arch": args.arch,
        "parameters": saved.num_parameters(),
        "stored_dtype": str(stored_dtype).removeprefix("torch."),
        "loss_start": round(losses[0], 4),
        "loss_end": round(sum(last) / len(last), 4),
        "held_out_nats_per_byte": round(held_out_loss(saved.eval(), held_out), 4),
        "steps": args.steps,
        "tokens": args.steps * BATCH_SIZE * SEQ_LEN,
        "corpus_bytes": len(tokens) + len(held_out),
        "seconds": round(seconds, 1),
        "versions": versions(("transformers",)),
    }
    text = json.dumps(result, indent=2)
    (args.output / "training.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
