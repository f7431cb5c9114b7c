"""A checkpoint and its conversion, run on the same inputs; module by module if memory
does not hold both.
"""

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
import torch
from transformers import AutoTokenizer

from ...patching import patched
from ...verification import NoiseFloor, verify_equivalence
from ...verification.context import TOKENS as RANDOM_TOKENS
from ...verification.context import (
    default_inputs,
    in_dtype_of,
    one_line,
    output_tensors,
    prompt_length,
)
from ...verification.float64 import in_float64
from ...verification.noise import compare_logits
from ..checkpoint.source import open_checkpoint
from ..plan import ConversionError
from ..proxy.model import config_and_class
from ..proxy.run import loaded, quiet
from ..tensors import one_thread

logger = logging.getLogger(__name__)

PROMPTS = (
    "The following table lists the statements that may be used in a function.",
    "An expression is evaluated before the result is bound to a name; if it raises an exception, the name keeps the "
    "value that it had.",
)
TOKENS = 64
GREEDY_TOKENS = 16
SHORT = 8
# output values of a comparison: from a few logits the source's own error cannot be
# estimated
ENOUGH = 128
TINY = 2**25  # bytes of weights up to which several threads cost more than they save
# bytes of weights from which on a few tokens are run, unless all is asked for
LARGE = 2**28
FEW_TOKENS = 16
# two models, and the widest weights of a run in float64, in sizes of the checkpoint
_IN_FLOAT64 = 6
_FOR_EACH = 0.1  # of the free memory: weights that stay while the others are read


@dataclass(frozen=True)
class Running:
    """How models are loaded and run: as in `convert_checkpoint`."""

    trust_remote_code: bool = False
    model_class: type | None = None
    inputs: Callable[[torch.nn.Module], dict] | None = None
    prompts: list[str] | None = None
    # "full" runs all texts of large models, and greedy tokens
    verify: bool | str = True

    def class_of(self, src) -> type:
        """The class that a source is loaded with."""
        _, cls = config_and_class(
            src, self.trust_remote_code, self.model_class, trained=True
        )
        return cls


def _figures(floor: NoiseFloor, kl: float, passed: bool) -> dict:
    """The figures of a run that people are shown."""
    figures = {
        "verdict": "PASS" if passed else "FAIL",
        "dtype": floor.dtype,
        "error": floor.candidate_max,
        "source's own error": floor.reference_max,
        "allowed": floor.allowed_max,
        "RMS error": floor.candidate_rms,
        "KL": kl,
    }
    reason = floor.reason
    if not passed and not reason and floor.candidate_max > floor.allowed_max:
        reason = "its error against float64 is larger than that of the source allows"
    if reason:
        figures["reason"] = reason
    return figures


@dataclass
class ModelPair:
    """Two models in eval mode, and keyword arguments of their forward, a batch each."""

    source: torch.nn.Module
    result: torch.nn.Module
    inputs: list[dict]
    run_on: str  # a description of the runs, for people
    greedy: bool  # whether greedy tokens are compared too
    # parameters that the result's checkpoint lacks, or has in another shape
    missing: list[str]

    def compare(self) -> dict:
        """Figures of the result, whose error against float64 is compared with the
        source's own.
        """
        if self.greedy:
            return self._compare_greedy()
        own, exact = self._of_source
        difference, floor = compare_logits(own, self._outputs(self.result), exact)
        return _figures(floor, difference.kl_mean, floor.passed)

    def _compare_greedy(self) -> dict:
        report = verify_equivalence(
            self.source,
            self.result,
            self.inputs,
            norms=False,
            max_new_tokens=GREEDY_TOKENS,
            backend="reference",
        )
        greedy = report.greedy
        equal = "equal" if greedy.equal else "tie" if greedy.passed else "different"
        figures = _figures(report.noise_floor, report.logits.kl_mean, report.passed)
        return {**figures, "greedy": greedy.reason or equal}

    @cached_property
    def _of_source(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The source's outputs, as it runs and in float64."""
        own = self._outputs(self.source)
        with in_float64(self.source):
            exact = [tensor.double() for tensor in self._outputs(self.source)]
        return own, exact

    def _compare_as_rms(self) -> dict:
        """As `compare`, with the result's norms as its config records them."""
        with patched(self.result) as report:
            count = sum(record.converted for record in report.swapped)
            figures = self.compare()
        figures["norms"] = f"{count} as RMSNorm"
        if count == 0:
            figures["verdict"] = "FAIL"
        return figures

    def compare_both(self) -> dict[str, dict]:
        """Figures of the result as it loads, and with RMSNorms."""
        runs = {"as LayerNorm": self.compare()}
        logger.info("verifying: result as RMSNorm")
        runs["as RMSNorm"] = self._compare_as_rms()
        return runs

    @torch.no_grad()
    def _outputs(self, model) -> list[torch.Tensor]:
        """The outputs of all inputs, in rows."""
        rows = []
        for inputs in self.inputs:
            rows += [
                t.flatten(0, -2) for t in output_tensors(model(**inputs)) if t.dim() > 1
            ]
        return rows

    def add_inputs_if_few(self) -> None:
        """Run random inputs too if the outputs of a classifier, say, are too few to
        compare.
        """
        outputs = self._outputs(self.source)
        if outputs and sum(t.numel() for t in outputs) < ENOUGH:
            more = _random(self.source, -(-ENOUGH // outputs[0].shape[-1]), SHORT)
            self.inputs.append(in_dtype_of(self.source, more))


@contextmanager
def side_by_side(src, folder: Path, how: Running) -> Iterator[ModelPair]:
    """Load two checkpoints in their own dtype, module by module if memory does not hold
    both.
    """
    cls, size = how.class_of(src), _size(Path(src))
    streamed = not fits_memory(Path(src))
    whole = not streamed and (how.verify == "full" or size < LARGE)
    with (
        tempfile.TemporaryDirectory() as scratch,
        one_thread() if size < TINY else nullcontext(),
    ):
        loading: dict = {"dtype": "auto", "trust_remote_code": how.trust_remote_code}
        if streamed:
            room = int(_FOR_EACH * psutil.virtual_memory().available)
            loading |= {
                "device_map": "auto",
                "max_memory": {"cpu": room},
                "offload_folder": scratch,
            }
        source, _ = loaded(cls, src, **loading)
        result, missing = loaded(cls, folder, **loading)
        # A float64 model has no wider run to compare with, and parts of its forward may
        # stay in float32.
        if source.dtype == torch.float64 and not streamed:
            source, result = source.float(), result.float()
        batches = _batches(src, source, how)
        if not whole:
            batches = [
                {name: _shortened(name, value) for name, value in batches[0].items()}
            ]
        greedy = how.verify == "full" and whole and _generates(source, batches)
        pair = ModelPair(
            source, result, batches, _run_on(streamed, whole), greedy, missing
        )
        logger.info("verifying: source and result %s", pair.run_on)
        if how.inputs is None:
            pair.add_inputs_if_few()
        yield pair


def _run_on(streamed: bool, whole: bool) -> str:
    if streamed:
        return f"side by side, module by module, on {FEW_TOKENS} tokens"
    if whole:
        return "side by side"
    return f"side by side, on {FEW_TOKENS} tokens as they are large (verify='full' runs all)"


def _generates(model, batches: list[dict]) -> bool:
    is_causal = model.can_generate() and not model.config.is_encoder_decoder
    return is_causal and all("input_ids" in batch for batch in batches)


def _batches(src, model, how: Running) -> list[dict]:
    """The inputs that the models are run on: the caller's, texts, or random ones."""
    batches = [how.inputs(model)] if how.inputs else _prompts(src, model, how)
    return [
        in_dtype_of(model, batch)
        for batch in batches or [_random(model, *RANDOM_TOKENS)]
    ]


def fits_memory(src: Path) -> bool:
    """Whether two models and a run of one in float64 fit into memory, roughly."""
    return _size(src) * _IN_FLOAT64 <= 0.8 * psutil.virtual_memory().available


def _size(src: Path) -> int:
    return sum(
        tensor.nbytes
        for tensor in open_checkpoint(src, allow_pickle=True).tensors.values()
    )


def _shortened(name: str, value):
    """A few tokens of token ids; any other value as it is."""
    return (
        value[:1, :FEW_TOKENS]
        if name.endswith("input_ids") and value.dim() == 2
        else value
    )


def _random(model, rows: int, tokens: int) -> dict:
    return default_inputs(model, (rows, tokens), GREEDY_TOKENS)


def _prompts(src, model, how: Running) -> list[dict]:
    """Token ids of the prompts; none if there is no tokenizer."""
    tokenizer = _tokenizer(src, model, how.trust_remote_code)
    if tokenizer is None:
        return []
    most = prompt_length(model.config, TOKENS, GREEDY_TOKENS)
    texts = [
        {"input_ids": tokenizer(t, return_tensors="pt").input_ids[:, :most]}
        for t in how.prompts or PROMPTS
    ]
    return [inputs for inputs in texts if inputs["input_ids"].numel()]


def tokenizer_of_source(src, how: Running):
    """The tokenizer of a source; None if it has none, and ConversionError if that does
    not load.
    """
    return _tokenizer(src, how.class_of(src), how.trust_remote_code)


def _tokenizer(src, model, trust_remote_code: bool):
    """The tokenizer of a folder, for a model or class that takes token ids; None if
    there is none.
    """
    if model.main_input_name != "input_ids" or not any(Path(src).glob("*token*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(
            src, trust_remote_code=bool(trust_remote_code)
        )
    except Exception as error:  # a tokenizer's own code may raise anything
        cure = "pass trust_remote_code=True if it brings code, or verify=False"
        raise ConversionError(
            f"{src}: its tokenizer does not load: {cure} ({one_line(error)})"
        ) from error


def missing_parameters(src, how: Running) -> list[str]:
    """Parameters of the model that the checkpoint lacks, found without reading values;
    refused if a shape differs.
    """
    cls = how.class_of(src)
    loading = {
        "device_map": "meta",
        "dtype": "auto",
        "trust_remote_code": how.trust_remote_code,
    }
    with quiet():
        try:
            _, info = cls.from_pretrained(
                src, **loading, ignore_mismatched_sizes=True, output_loading_info=True
            )
        except Exception as error:  # a model's own code may raise anything
            cure = "repair the folder, or pass the model_class that it was saved from"
            raise ConversionError(
                f"{src}: {cls.__name__} does not load it: {cure} ({one_line(error)})"
            ) from error
    if info["mismatched_keys"]:
        key, stored, wanted = sorted(info["mismatched_keys"])[0]
        what = f"{key} has shape {[*stored]} in the checkpoint, and {[*wanted]} by its config.json"
        raise ConversionError(f"{src}: {what}: one of the two is of another model")
    return sorted(info["missing_keys"])
