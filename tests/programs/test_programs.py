"""`hf-rmsnorm run` with the programs that people run: the same results as without, bit
for bit, with every model patched. What CI does not install, `scripts/programs.py` does.
"""

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from places import EXAMPLES, PYTHONPATH, ROOT
from processes import ran

RUN = [sys.executable, "-m", "hf_rmsnorm", "run"]
BIN = Path(sys.executable).parent
WHERE = "runs on cpu: Triton kernels in Triton's interpreter, exact but slow"
ELSEWHERE = "scripts/programs.py installs and runs it"


def environment(tmp_path):
    return {
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
    }


def ended(words, tmp_path):
    """(stdout, stderr) of a command that has to end well."""
    done = ran(*words, **environment(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, done.stderr


def lines(stderr):
    """What the command says of models, but for the count of compared kernels."""
    ours = [line for line in stderr.splitlines() if line.startswith("hf_rmsnorm: ")]
    return [line for line in ours if "at their first use" not in line]


def of_model(name, norms):
    return f"hf_rmsnorm: {name}: {norms} norms swapped, 0 skipped; {WHERE}"


def test_lm_eval_gives_the_same_figures(tmp_path):
    pytest.importorskip("lm_eval", reason=ELSEWHERE)
    words = ["--include_path", EXAMPLES / "programs", "--tasks", "demo_text"]
    words += ["--model", "hf", "--model_args", "pretrained=hf_rmsnorm/demo/llama"]

    def figures(folder, *command):
        folder = tmp_path / folder
        said = ended([*command, *words, "--output_path", folder], tmp_path)
        (file,) = folder.rglob("results*.json")
        return json.loads(file.read_text())["results"], lines(said[1])

    expected, _ = figures("without", BIN / "lm_eval")
    assert expected["demo_text"]["bits_per_byte,none"] > 0
    patched = figures("with", *RUN, "lm_eval")
    assert patched == (expected, [of_model("LlamaForCausalLM", 11)])


@contextmanager
def served(command, tmp_path):
    """The port of a server; and a list, which has its stderr once it was ended."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [*command, "--port", port, "--device", "cpu"]
    server = subprocess.Popen(
        list(map(str, words)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    said = []
    try:
        for line in server.stderr:
            said.append(line)
            if "Uvicorn running on" in line:
                break
        assert server.poll() is None, said
        yield port, said
    finally:
        server.kill()  # under continuous batching it does not end by itself
        said += server.stderr.readlines()
        server.wait()


# of a cache that is otherwise most of the memory
BATCHING = ["--continuous-batching", "--cb-num-blocks", 64, "--cb-max-batch-tokens", 64]


@pytest.mark.parametrize("batching", [[], BATCHING])
def test_transformers_serve_answers_an_openai_client_the_same(batching, tmp_path):
    pytest.importorskip("openai", reason=ELSEWHERE)
    pytest.importorskip("fastapi", reason=ELSEWHERE)
    texts = []
    for command in ([BIN / "transformers"], [*RUN, "transformers"]):
        words = [*command, "serve", "hf_rmsnorm/demo/qwen3", *batching]
        with served(words, tmp_path) as (port, said):
            ask = [sys.executable, EXAMPLES / "programs" / "ask.py", port]
            texts.append(ended(ask, tmp_path)[0])
        told = lines("".join(said))
    assert len(texts[0]) > 10 and texts[1] == texts[0]
    assert told == [of_model("Qwen3ForCausalLM", 17)]


ENCODES = """
from sentence_transformers import SentenceTransformer
model = SentenceTransformer("hf_rmsnorm/demo/llama")
print(model.encode(["The import statement", "while"]).tobytes().hex())
"""


def test_sentence_transformers_gives_the_same_embeddings(tmp_path):
    pytest.importorskip("sentence_transformers", reason=ELSEWHERE)
    script = tmp_path / "encodes.py"
    script.write_text(ENCODES)
    expected, _ = ended([sys.executable, script], tmp_path)
    said, told = ended([*RUN, script], tmp_path)
    assert len(expected) > 100 and said == expected
    assert lines(told) == [of_model("LlamaModel", 11)]


@pytest.mark.full
def test_dpo_of_trl_has_the_same_losses_with_its_reference_model_patched(tmp_path):
    pytest.importorskip("trl", reason="the trainers that this is for")
    words = ["-m", "trl.scripts.dpo", "--config", EXAMPLES / "programs" / "dpo.yaml"]
    words += ["--output_dir", tmp_path]

    def losses(said):
        return re.findall(r"'(?:loss|logps/\w+)': '(\S+)'", said)

    said = "".join(ended([sys.executable, *words], tmp_path))
    out, told = ended([*RUN, *words], tmp_path)
    assert len(losses(said)) == 9 and losses(out + told) == losses(said)
    assert lines(told) == [of_model("LlamaForCausalLM", 11)] * 2
