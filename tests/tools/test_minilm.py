"""scripts/minilm.py from end to end on a tiny encoder, and the figures that it measured
on the real one.
"""

import json
import string

import postnorm_models
import pytest
from transformers import BertTokenizer

from scripts import minilm

pytestmark = pytest.mark.full


def write_tokenizer(folder):
    letters = string.ascii_lowercase + string.digits + string.punctuation
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    words += [f"##{letter}" for letter in letters]
    (folder / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizer(str(folder / "vocab.txt"), model_max_length=32)
    tokenizer.save_pretrained(folder)


def test_the_script_measures_a_tiny_encoder(tmp_path, monkeypatch, capsys):
    postnorm_models.build("bert", vocab_size=256).float().save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    monkeypatch.setattr(minilm, "HELD_OUT", 64)
    monkeypatch.setattr(minilm, "CALIBRATION", 320)
    out = tmp_path / "minilm.json"
    minilm.main([str(tmp_path), "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["sentences"]["held_out"] == 64
    norms = {way: result[way]["norms"] for way in ("naive", "exact", "fit")}
    assert norms == {"naive": [5, 5], "exact": [3, 5], "fit": [5, 5]}
    assert result["exact"]["rms_norm"]["cosine_min"] > 1 - 5e-7
    for way in norms:
        # every checkpoint is the original to a plain AutoModel
        assert result[way]["layer_norm"]["cosine_min"] > 1 - 5e-7
    naive, fit = (result[way]["rms_norm"]["cosine_mean"] for way in ("naive", "fit"))
    assert naive < fit
    assert "exact: reached" in capsys.readouterr().out
    assert str(tmp_path) not in out.read_text()
