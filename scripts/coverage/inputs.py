"""Finds inputs that a model runs on, from the names in its forward's signature and from
what its errors ask for.
"""

from __future__ import annotations

import copy
import itertools
import linecache
import re
import time
from collections.abc import Iterator

import torch

from .arguments import Candidates

# Arguments that belong together, added when a model fails for want of something it does
# not name.
COMPANIONS = (
    ("lang_ids",),
    ("decoder_input_ids",),
    ("attention_mask",),
    ("bbox",),
    ("image_grid_thw",),
    ("grid_thw",),
    ("pixel_values",),
    ("input_features",),
    ("encoder_hidden_states",),
    ("pixel_mask",),
    ("image_sizes",),
    ("labels",),
    ("states", "actions", "rewards", "returns_to_go", "timesteps"),
    (
        "past_time_features",
        "past_observed_mask",
        "future_values",
        "future_time_features",
    ),
    ("pixel_values", "decoder_input_ids"),
    ("input_ids", "attention_mask"),
    ("pixel_values", "bbox"),
    ("input_ids", "pixel_values"),
    ("pixel_attention_mask",),
    ("spatial_shapes",),
    ("return_loss",),
    ("past_observed_mask",),
    ("padding_mask",),
    ("input_features_mask",),
    ("feature_attention_mask",),
    ("use_cache",),
)


def _of_rank(values: list, rank: int) -> int | None:
    return next(
        (
            i
            for i, v in enumerate(values)
            if isinstance(v, torch.Tensor) and v.dim() == rank
        ),
        None,
    )


class Inputs(Candidates):
    """Finds the arguments of one forward by trying candidates."""

    def start(self) -> list[str]:
        """The arguments to begin with: the model's main input, all required ones, and a
        decoder's ids.
        """
        required = [n for n, p in self.parameters.items() if p.default is p.empty]
        main = getattr(self.model, "main_input_name", None)
        names = [
            n
            for n in ([main] if isinstance(main, str) else main or [])
            if n in self.parameters
        ]
        if not names and not required:
            names = [next(iter(self.parameters))] if self.parameters else []
        if (
            getattr(self.config, "is_encoder_decoder", False)
            and "decoder_input_ids" in self.parameters
        ):
            names.append("decoder_input_ids")
        return list(
            dict.fromkeys([*self.hints, *([] if self.hints else names), *required])
        )

    def _widened(self, value, size: tuple[int, int] | None):
        """The value, or another in which one dimension, given by its index, has another
        size.
        """
        if size is None:
            return value
        shape = [*value.shape]
        shape[size[0]] = size[1]
        return self.normal(*shape)

    def attempts(self) -> Iterator[dict]:
        """Keyword arguments to try; send the error of each back in, and the next have
        the argument that it asks for.

        An attempt that fails otherwise than the one it was made from has got further,
        so its variants come first.
        """
        queue, seen = [(dict.fromkeys(self.start(), 0), "")], set()
        while queue:
            choice, before = queue.pop(0)
            key = tuple(sorted(map(str, choice.items())))
            if key in seen:
                continue
            seen.add(key)
            options = {name: self.candidates(name) for name in choice}
            picked = {
                name: (index, None) if isinstance(index, int) else index
                for name, index in choice.items()
            }
            if any(
                picked[name][0] >= len(values) and values
                for name, values in options.items()
            ):
                continue
            error, absent = yield {
                n: self._widened(values[picked[n][0]], picked[n][1])
                for n, values in options.items()
                if values
            }
            variants, urgent = self._variants(choice, picked, options, error, absent)
            kind = re.sub(r"\d+", "#", error)[:80]
            made = [(variant, kind) for variant in variants]
            if kind != before:
                queue[:0] = made
            else:
                queue[:0], queue[len(queue) :] = made[:urgent], made[urgent:]

    def _variants(
        self, choice: dict, picked: dict, options: dict, error: str, absent: list
    ) -> tuple[list[dict], int]:
        """(choices to try next, how many of them come before the queue)."""
        missing, variants = self._with_missing(choice, error, absent)
        variants += [
            {**choice, n: (i, size)}
            for n, (i, now) in picked.items()
            if options[n] and now is None
            for size in wanted_sizes(options[n][i], error)
        ]
        if match := WANTED_RANK.search(error):
            ranked = {
                n: _of_rank(values, int(match[1])) for n, values in options.items()
            }
            variants += [
                {**choice, n: i}
                for n, i in ranked.items()
                if i is not None and i > picked[n][0]
            ]
        variants += [
            {**choice, name: index + 1} for name, (index, _) in reversed(picked.items())
        ]
        # A wrong shape is looked for among this argument's other candidates before
        # other arguments are added.
        urgent = (
            len(variants)
            if re.search(r"shape|size|dimension", error)
            else len(missing) > 0
        )
        return variants + self._with_companions(choice), urgent

    def _with_missing(
        self, choice: dict, error: str, absent: list
    ) -> tuple[list[str], list[dict]]:
        """(arguments that an error asks for, choices that have them, together or one by
        one).
        """
        missing = [
            n
            for n in self.optional
            if n not in choice and re.search(rf"\b{n}\b", error)
        ]
        named = len(missing)
        # a forward makes others from them
        ids = any(n.endswith("input_ids") for n in (*choice, *absent))
        missing += [
            n
            for n in absent
            if n not in {*choice, *missing} and not (ids and DERIVED.search(n))
        ]
        together = [{**choice, **dict.fromkeys(missing, 0)}] if missing else []
        single = [{**choice, n: 0} for n in missing] if len(missing) > 1 else []
        return missing, [*together, *single] if named else [*single, *together]

    def _with_companions(self, choice: dict) -> list[dict]:
        """Choices with further arguments that models take together."""
        if len(choice) >= 6:
            return []
        extra = [
            [n for n in names if n in self.optional and n not in choice]
            for names in COMPANIONS
        ]
        return [{**choice, **dict.fromkeys(names, 0)} for names in extra if names]


def find_inputs(
    model, dtype: torch.dtype, budget: float, most: int = 150, hints: dict | None = None
):
    """(keyword arguments that the model runs on, []) or (None, the different errors
    that were met, the first first).

    Args:
        budget: seconds of CPU.
        most: attempts.
        hints: arguments to begin with, as in `hints.INPUTS`.
    """
    deadline = time.process_time() + budget
    inputs = Inputs(model, dtype, hints=hints)
    attempts = inputs.attempts()
    errors: list[str] = []
    try:
        arguments = next(attempts)
    except REFUSALS as exception:  # a hint that was made for a model of other sizes
        return None, [f"{type(exception).__name__}: {exception}"]
    for _ in itertools.repeat(None, most):
        try:
            torch.manual_seed(0)
            with torch.no_grad():
                output = model(**fresh(arguments))
            if any(True for _ in tensors(output)):
                return arguments, []
            error, absent = "it returned no tensor", []
        except REFUSALS as exception:
            error = f"{type(exception).__name__}: {exception}"
            absent = (
                absent_arguments(exception, inputs.optional) if "None" in error else []
            )
        if error not in errors:
            errors.append(error)
        if time.process_time() > deadline:
            break
        try:
            arguments = attempts.send((error, absent))
        except REFUSALS:  # StopIteration among them
            break
    return None, errors


def fresh(arguments: dict) -> dict:
    """The arguments for another call, with copies of all that a call could change."""
    return {
        n: v if isinstance(v, torch.Tensor) else copy.deepcopy(v)
        for n, v in arguments.items()
    }


def tensors(output) -> Iterator[torch.Tensor]:
    """Every tensor of a model's output, in order; caches are left out."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for key, value in output.items():
            if "past_key_values" not in key and "cache" not in key:
                yield from tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors(value)


REFUSALS = (
    AttributeError,
    AssertionError,
    ImportError,
    IndexError,
    KeyError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
    UnboundLocalError,
    ZeroDivisionError,
)
# The last dimension that a linear layer, a norm or a sum wanted, and the second one
# that a convolution did.
WANTED_WIDTH = re.compile(
    r"cannot be multiplied \(\d+x\d+ and (\d+)x|must match the size of tensor b \((\d+)\)|with shape \[\*, (\d+)\]"
)
WANTED_MULTIPLE = re.compile(r"multiple of \D{0,30}(\d+)")
WANTED_CHANNELS = re.compile(r"expected input\[([\d, ]+)\] to have (\d+) channels")
DERIVED = re.compile(r"inputs_embeds$|position_ids$")
WANTED_RANK = re.compile(r"unpack \(expected (\d)")


def wanted_sizes(value, error: str) -> list[tuple[int, int]]:
    """(dimension, size) that an error asks for, where this value can be meant."""
    found = []
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return found
    if match := WANTED_WIDTH.search(error):
        width = int(next(filter(None, match.groups())))
        # nothing in a tiny model is wider
        found += [(-1, width)] if width <= 1024 else []
    if match := WANTED_MULTIPLE.search(error):
        found.append((-1, 2 * int(match[1])))
    if (match := WANTED_CHANNELS.search(error)) and match[1] == ", ".join(
        map(str, value.shape)
    ):
        found.append((1, int(match[2])))
    return found


def absent_arguments(error: BaseException, names: list[str]) -> list[str]:
    """Those of the arguments `names` that the failing expression uses while they are
    None, in the innermost frame.
    """
    found: list[str] = []
    for frame, instruction in ((t.tb_frame, t.tb_lasti) for t in _tracebacks(error)):
        first, last, *_ = next(
            itertools.islice(frame.f_code.co_positions(), instruction // 2, None)
        )
        words: set[str] = set()
        for number in range(first or 0, (last or -1) + 1):
            words.update(
                re.findall(r"\w+", linecache.getline(frame.f_code.co_filename, number))
            )
        found = [
            n for n in names if n in words and frame.f_locals.get(n, n) is None
        ] or found
    return found


def _tracebacks(error: BaseException):
    at = error.__traceback__
    while at is not None:
        yield at
        at = at.tb_next
