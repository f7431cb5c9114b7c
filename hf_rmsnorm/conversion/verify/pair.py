"""A checkpoint and what was made of it, run on the same inputs; where memory does not hold both, module by module."""

import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil
import torch
from transformers import AutoTokenizer

from ...patching import patched
from ...verification import NoiseFloor, verify_equivalence
from ...verification.context import TOKENS as RANDOM_TOKENS
from ...verification.context import default_inputs, hooked, in_dtype_of, one_line, output_tensors, prompt_length
from ...verification.float64 import in_float64
from ...verification.noise import compare_logits
from ..plan import ConversionError
from ..proxy.model import config_and_class
from ..proxy.run import and_more, loaded, quiet

logger = logging.getLogger(__name__)

PROMPTS = (
    "The following table lists the statements that may be used in a function.",
    "An expression is evaluated before the result is bound to a name; if it raises an exception, the name keeps the "
    "value that it had.",
)
TOKENS = 64
GREEDY_TOKENS = 16
SHORT = 8
ENOUGH = 128  # numbers to judge by: of a classifier's few logits the source's own error would be chance
LARGE = 2**28  # bytes of weights from which on a few tokens are run, unless all is asked for
FEW_TOKENS = 16
_IN_FLOAT64 = 6  # two models, and the widest weights of a run in float64, in sizes of the checkpoint
_FOR_EACH = 0.1  # of the free memory: weights that stay while the others are read


@dataclass(frozen=True)
class Running:
    """How models are loaded and run: as in `convert_checkpoint`."""

    trust_remote_code: bool = False
    model_class: type | None = None
    inputs: Callable[[torch.nn.Module], dict] | None = None
    prompts: list[str] | None = None
    verify: bool | str = True  # "full" runs all of large models too


def _figures(floor: NoiseFloor, kl: float, passed: bool) -> dict:
    """What people are shown of a run."""
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
    return {**figures, "reason": reason} if reason else figures


@dataclass
class ModelPair:
    """Two models in eval mode, and keyword arguments of their forward, a batch each."""

    source: torch.nn.Module
    result: torch.nn.Module
    inputs: list[dict]
    streamed: bool  # the weights are read from the shards as they are needed
    whole: bool  # all texts and greedy tokens are run, and not a few tokens alone
    missing: list[str]  # parameters that the result's checkpoint does not have, or in another shape

    @property
    def run_on(self) -> str:
        """What is run, for people."""
        if self.streamed:
            return f"side by side, module by module, on {FEW_TOKENS} tokens"
        if self.whole:
            return "side by side"
        return f"side by side, on {FEW_TOKENS} tokens as they are large (verify='full' runs all)"

    def compare(self) -> tuple[dict, NoiseFloor]:
        """(figures for people, noise floor) of the result, by the source's own error against float64."""
        generates = self.source.can_generate() and not self.source.config.is_encoder_decoder
        if generates and self.whole and all("input_ids" in inputs for inputs in self.inputs):
            how = {"norms": False, "max_new_tokens": GREEDY_TOKENS, "backend": "reference"}
            report = verify_equivalence(self.source, self.result, self.inputs, **how)
            greedy = report.greedy
            equal = "equal" if greedy.equal else "tie" if greedy.passed else "different"
            figures = _figures(report.noise_floor, report.logits.kl_mean, report.passed)
            return {**figures, "greedy": greedy.reason or equal}, report.noise_floor
        own, exact = self._of_source
        difference, floor = compare_logits(own, self.outputs(self.result), exact)
        return _figures(floor, difference.kl_mean, floor.passed), floor

    @cached_property
    def _of_source(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The source's outputs, as it runs and in float64."""
        own = self.outputs(self.source)
        with in_float64(self.source):
            return own, [t.double() for t in self.outputs(self.source)]

    def compare_as_rms(self) -> tuple[dict, NoiseFloor]:
        """As `compare`, with the result's norms as its config records them."""
        with patched(self.result) as report:
            count = sum(record.converted for record in report.swapped)
            figures, floor = self.compare()
        return {**figures, "norms": f"{count} as RMSNorm", **({} if count else {"verdict": "FAIL"})}, floor

    def last_of(self, paths) -> str | None:
        """The module among these paths that runs last."""
        seen: list[str] = []
        with hooked(self.result, paths, lambda path, *_: seen.append(path)):
            self.outputs(self.result)
        return seen[-1] if seen else None

    @torch.no_grad()
    def outputs(self, model) -> list[torch.Tensor]:
        """Of all inputs, in rows."""
        return [t.flatten(0, -2) for given in self.inputs for t in output_tensors(model(**given)) if t.dim() > 1]


@contextmanager
def side_by_side(src, folder: Path, how: Running) -> Iterator[ModelPair]:
    """Load two checkpoints in their own dtype, module by module where memory does not hold both."""
    _, cls = config_and_class(src, how.trust_remote_code, how.model_class, trained=True)
    streamed = not fits_memory(Path(src))
    with tempfile.TemporaryDirectory() as scratch:
        loading: dict = {"dtype": "auto", "trust_remote_code": how.trust_remote_code}
        if streamed:
            room = int(_FOR_EACH * psutil.virtual_memory().available)
            loading |= {"device_map": "auto", "max_memory": {"cpu": room}, "offload_folder": scratch}
        (source, _), (result, missing) = loaded(cls, src, **loading), loaded(cls, folder, **loading)
        # Nothing is wider to tell its own error by; and parts of a forward stay in float32, not the same ones in both.
        if source.dtype == torch.float64 and not streamed:
            source, result = source.float(), result.float()
        whole = not streamed and (how.verify == "full" or _size(Path(src)) < LARGE)
        batches = _batches(src, source, how)
        if not whole:
            batches = [{name: _shortened(name, value) for name, value in batch.items()} for batch in batches[:1]]
        pair = ModelPair(source, result, batches, streamed, whole, missing)
        logger.info("verifying: source and result %s", pair.run_on)
        outputs = pair.outputs(source) if how.inputs is None else []
        if outputs and sum(t.numel() for t in outputs) < ENOUGH:
            more = _random(source, -(-ENOUGH // outputs[0].shape[-1]), SHORT)
            pair.inputs.append(in_dtype_of(source, more))
        yield pair


def _batches(src, model, how: Running) -> list[dict]:
    """What the models are run on: the caller's inputs, texts, or random ones."""
    batches = [how.inputs(model)] if how.inputs else _prompts(src, model, how)
    return [in_dtype_of(model, batch) for batch in batches or [_random(model, *RANDOM_TOKENS)]]


def fits_memory(src: Path) -> bool:
    """Whether two models and a run of one in float64 fit into memory, roughly."""
    return _size(src) * _IN_FLOAT64 <= 0.8 * psutil.virtual_memory().available


def _size(src: Path) -> int:
    return sum(path.stat().st_size for path in (*src.glob("*.safetensors"), *src.glob("*.bin")))


def _shortened(name: str, value):
    """A few tokens of token ids; all else as it is."""
    return value[:1, :FEW_TOKENS] if name.endswith("input_ids") and value.dim() == 2 else value


def _random(model, rows: int, tokens: int) -> dict:
    return default_inputs(model, (rows, tokens), GREEDY_TOKENS)


def tokenizer_of(src, model, trust_remote_code: bool):
    """The tokenizer of a folder, for a model or class that takes token ids; None where there is none."""
    if model.main_input_name != "input_ids" or not any(Path(src).glob("*token*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(src, trust_remote_code=bool(trust_remote_code))
    except Exception as error:  # whatever a tokenizer's own code raises
        cure = "pass trust_remote_code=True if it brings code, or verify=False"
        raise ConversionError(f"{src}: its tokenizer does not load: {cure} ({one_line(error)})") from error


def look_first(src, how: Running) -> None:
    """Raise ConversionError for what would end the conversion, before anything is planned or written."""
    _, cls = config_and_class(src, how.trust_remote_code, how.model_class, trained=True)
    absent = _absent(src, cls, how)
    if not how.verify:
        return
    if absent:  # by which nothing can be compared: what is made up for it is another in each of the two
        raise ConversionError(f"{src}: has no {and_more(absent)}: add what is missing, or pass verify=False")
    if how.inputs is None:
        tokenizer_of(src, cls, how.trust_remote_code)


def _absent(src, cls, how: Running) -> list[str]:
    """Parameters of the model that the checkpoint does not have; it is loaded without its values."""
    loading = {"device_map": "meta", "dtype": "auto", "trust_remote_code": how.trust_remote_code}
    with quiet():
        try:
            _, info = cls.from_pretrained(src, **loading, ignore_mismatched_sizes=True, output_loading_info=True)
        except Exception as error:  # whatever a model's own code raises
            cure = "mend the folder, or pass the model_class that it was saved from"
            raise ConversionError(f"{src}: {cls.__name__} does not load it: {cure} ({one_line(error)})") from error
    if info["mismatched_keys"]:
        key, stored, wanted = sorted(info["mismatched_keys"])[0]
        what = f"{key} has shape {[*stored]} in the checkpoint, and {[*wanted]} by its config.json"
        raise ConversionError(f"{src}: {what}: one of the two is of another model")
    return sorted(info["missing_keys"])


def _prompts(src, model, how: Running) -> list[dict]:
    """What the tokenizer makes of the prompts; none where there is no tokenizer."""
    if (tokenizer := tokenizer_of(src, model, how.trust_remote_code)) is None:
        return []
    most = prompt_length(model.config, TOKENS, GREEDY_TOKENS)
    texts = [{"input_ids": tokenizer(t, return_tensors="pt").input_ids[:, :most]} for t in how.prompts or PROMPTS]
    return [inputs for inputs in texts if inputs["input_ids"].numel()]
