"""The report of a verification: lines for readers, and plain JSON."""

import copy
import json

from hf_rmsnorm.verification import EquivalenceReport
from tests.unit.verification.test_equivalence import (
    BF16,
    OneRoundingNorm,
    compare,
    text_ids,
    trained_llama,
)


def test_report_prints_a_verdict_per_line_and_gives_plain_json():
    model = trained_llama(BF16)
    candidate = copy.deepcopy(model)
    norm = candidate.model.layers[1].input_layernorm
    norm.__class__ = OneRoundingNorm
    report = compare(model, candidate, text_ids(), 2)
    assert isinstance(report, EquivalenceReport)
    lines = str(report).splitlines()
    assert "PASS  error" in str(report)
    assert "FAIL  norms" in str(report)
    assert "FAIL      model.layers.1.input_layernorm:" in str(report)
    assert max(map(len, lines)) <= 100
    assert lines[0] == "FAIL: norms"
    written = json.dumps(report.to_dict(), allow_nan=False)
    data = json.loads(written)
    assert data["passed"] is False
    assert data["noise_floor"]["passed"] is True
    assert data["greedy"]["passed"] is True
    assert data["norms"][0]["path"] == "model.layers.1.input_layernorm"
