"""Long work of the command line says how far it is, and draws its result where it is
asked to.
"""

import io
import sys

import pytest

from hf_rmsnorm.cli import common, plot
from hf_rmsnorm.verification.noise import NoiseFloor


class Terminal(io.StringIO):
    def isatty(self):
        return True


def bar_on(stream, monkeypatch) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with common.progress_bar(4, "generating", "run") as bar:
        bar.update(2)
    return stream.getvalue()


def test_a_terminal_shows_how_far_it_is_and_what_remains(monkeypatch):
    shown = bar_on(Terminal(), monkeypatch)
    assert "generating:  50%" in shown and "2/4" in shown and "<00:00" in shown


def test_elsewhere_short_work_says_nothing_and_long_work_a_line(monkeypatch):
    assert bar_on(io.StringIO(), monkeypatch) == ""
    monkeypatch.setattr(common, "A_MINUTE", 0.0)
    assert "generating:  50%" in bar_on(io.StringIO(), monkeypatch)


SHORT = ("bench", "demo:llama", "--device", "cpu", "--new-tokens", 1, "--length", 2)


def test_bench_draws_its_times_and_prints_as_without(run, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'plot'")
    file = tmp_path / "times.svg"
    code, out, err = run(*SHORT, "--plot", file)
    assert code == 0 and err == "" and "ms per training step" in out
    assert "<svg" in file.read_text(encoding="utf-8")


@pytest.mark.full
def test_verify_draws_the_error_behind_each_layer(run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the extra 'plot'")
    drawn = {}
    monkeypatch.setattr(
        "hf_rmsnorm.cli.verify.draw_errors", lambda *args: drawn.update(args[2])
    )
    file = tmp_path / "errors.png"
    options = ("--max-tokens", 2, "--max-new-tokens", 0, "--no-backward")
    run("verify", "demo:llama", "--dtype", "fp32", *options, "--plot", file)
    (floors,) = drawn.values()
    assert len(floors) == 5 and all(floor.passed for floor in floors)


def test_errors_are_drawn_for_each_dtype(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'plot'")
    floor = NoiseFloor(reference_rms=1e-3, candidate_rms=2e-3)
    file = tmp_path / "errors.png"
    plot.draw_errors(file, "a model", {"float32": [floor] * 3, "bfloat16": [floor] * 3})
    assert file.stat().st_size > 1000


@pytest.mark.parametrize("file", ["times", "missing/times.png"])
def test_a_picture_that_cannot_be_written_is_refused_before_the_work(
    run, tmp_path, file
):
    pytest.importorskip("matplotlib", reason="the extra 'plot'")
    code, out, err = run(*SHORT, "--plot", tmp_path / file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "name a .png, .svg or .pdf in a folder that can be written" in err


def test_without_matplotlib_one_line_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run(*SHORT, "--plot", "times.png")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "needs matplotlib: pip install matplotlib" in err
