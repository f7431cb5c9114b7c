"""scripts/minilm.py from end to end on a tiny encoder, and the figures that it measured
on the real one.
"""

import importlib.util
import json
import string

import postnorm_models
import pytest
from places import SCRIPTS
from transformers import BertTokenizer

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def minilm():
    spec = importlib.util.spec_from_file_location("minilm", SCRIPTS / "minilm.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_measures_a_tiny_encoder(minilm, tmp_path, monkeypatch, capsys):
    postnorm_models.build("bert", vocab_size=256).float().save_pretrained(tmp_path)
    letters = string.ascii_lowercase + string.digits + string.punctuation
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *("##" + c for c in letters),
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(tmp_path / "vocab.txt"), model_max_length=32).save_pretrained(
        tmp_path
    )
    monkeypatch.setattr(minilm, "HELD_OUT", 64)
    out = tmp_path / "minilm.json"
    code = minilm.main([str(tmp_path), "--out", str(out), "--calibration", "320"])
    result = json.loads(out.read_text())
    assert (
        result["sentences"]["held_out"] == 64
        and result["sentences"]["calibration"] == 320
    )
    assert [result[way]["norms"] for way in ("naive", "exact", "fit")] == [
        [5, 5],
        [3, 5],
        [5, 5],
    ]
    assert result["exact"]["rms_norm"]["cosine_min"] > 1 - 5e-7
    for way in ("naive", "exact", "fit"):
        # every checkpoint is the original to a plain AutoModel
        assert result[way]["layer_norm"]["cosine_min"] > 1 - 5e-7
    assert (
        result["naive"]["rms_norm"]["cosine_mean"]
        < result["fit"]["rms_norm"]["cosine_mean"]
    )
    reached = (
        result["fit"]["rms_norm"]["cosine_mean"] >= 0.9999
        and result["fit"]["rms_norm"]["cosine_min"] >= 0.999
    )
    assert code == (0 if reached else 1) and "exact: reached" in capsys.readouterr().out
    assert str(tmp_path) not in out.read_text()


def test_the_committed_figures_are_those_that_were_asked_for():
    result = json.loads((SCRIPTS / "results" / "minilm.json").read_text())
    assert result["sentences"]["held_out"] == 800
    assert (
        result["exact"]["norms"] == [7, 13]
        and result["exact"]["rms_norm"]["cosine_min"] >= 0.9999995
    )
    assert result["fit"]["norms"] == [13, 13]
    assert (
        result["fit"]["rms_norm"]["cosine_mean"] >= 0.9999
        and result["fit"]["rms_norm"]["cosine_min"] >= 0.999
    )
    naive, fit = (result[f"{name} distilled"] for name in ("naive", "fit"))
    for start, trained in ((result["naive"], naive), (result["fit"], fit)):
        assert trained["written"] and trained["norms"] == [13, 13]
        assert trained["rms_norm"]["cosine_mean"] > start["rms_norm"]["cosine_mean"]
