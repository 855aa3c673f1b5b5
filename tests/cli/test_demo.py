"""``guarddcp demo``, run small, and the words it finds for a broken promise."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from guarddcp.cli import demo
from guarddcp.cli.demo import Outcome, Progress, render, run_demo
from guarddcp.cli.gpt import SIZES
from guarddcp.cli.job import Distance, Job, Resumed, Saved
from guarddcp.cli.probe import Deviation
from guarddcp.config import Guard
from guarddcp.errors import CheckpointExistsError
from guarddcp.report import Report

ROOT = Path(__file__).parents[2]
STEPS, MORE = 12, 4


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory):
    """The command as a user runs it: its process, its JSON and the folder that it kept."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "guarddcp", "demo", "--size", "tiny", "--json", "--keep", str(folder)]
    command += ["--steps", str(STEPS), "--more-steps", str(MORE), "--tolerance", "0.02"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return done, json.loads(done.stdout), folder


def test_demo_keeps_the_promise(demo_run):
    _, result, _ = demo_run
    assert result["violations"] == result["warnings"] == result["verified"]["problems"] == []
    assert result["verified"]["certificates"] >= 1
    assert result["verified"]["certified_bound"] == pytest.approx(result["certified_bound"], rel=1e-6)
    assert result["tolerance"] == 0.02
    assert (
        0 < result["next_step"]["largest"] <= result["largest_of_promised_steps"] <= result["certified_bound"] <= 0.02
    )
    assert 0 < result["next_step"]["rms"] < result["next_step"]["largest"]
    assert 0.05 < result["next_step"]["rms_update"] < 2
    # The same state and, up to the order of a sum, the same gradients on another number of ranks.
    assert result["next_step_one_rank"]["largest"] == pytest.approx(result["next_step"]["largest"], rel=0.05)


def test_demo_counts_bytes(demo_run):
    _, result, folder = demo_run
    sizes = result["bytes"]
    # Vectors of a few entries are not worth a certificate each.
    assert 0.95 < sizes["coordinates"] / SIZES["tiny"].parameters <= 1
    assert sizes["moments_raw"] == 8 * sizes["coordinates"]
    assert sizes["weights_raw"] == 4 * SIZES["tiny"].parameters
    assert 0.05 < sizes["moments_stored"] / sizes["moments_raw"] < 0.4
    assert sizes["exact_raw"] > sizes["weights_raw"] > sizes["weights_stored"]
    on_disk = sum(path.stat().st_size for path in (folder / "certified").rglob("*"))
    assert on_disk == sizes["certified_total"] < sizes["plain_total"]
    assert sizes["moments_stored"] + sizes["exact_stored"] <= sizes["certified_total"]


def test_both_runs_go_on(demo_run):
    _, result, _ = demo_run
    native, restored = result["loss"]["native"], result["loss"]["restored"]
    assert len(native) == len(restored) == MORE
    assert native[0] == restored[0]
    assert native[-1] == pytest.approx(restored[-1], abs=0.01)
    apart, travelled = result["parameter_distance"], result["parameter_travel"]
    assert 0 < apart["rms"] < apart["largest"] < 0.5 * result["lr"]
    assert result["lr"] < travelled["rms"] < travelled["largest"] < 2 * MORE * result["lr"]


def test_progress_and_phases_are_shown(demo_run):
    done, result, _ = demo_run
    assert f"step {STEPS} of {STEPS}, loss" in done.stderr
    assert list(result["seconds"]) == [
        "import torch, compile kernels if this is the first time",
        "train and save on 2 ranks",
        "verify",
        "restore and continue on 3 ranks",
        "restore on 1 rank",
    ]


def test_kept_folder_is_not_overwritten(demo_run):
    folder = demo_run[2]
    assert (folder / "certified" / ".metadata").is_file()
    with pytest.raises(CheckpointExistsError, match=r"certified: the demo overwrites nothing. Choose another folder"):
        run_demo(guard=Guard(), keep=str(folder), steps=1, more=1, size="tiny", as_json=False)


def outcome(*, largest=0.004, bound=0.0099, differing=(), one_digest="a", horizon=1559, far=0.0436):
    """An Outcome as the demo measures it, with the figures that a test wants."""
    deviation = Deviation(largest=0.003, rms=0.001, rms_update=0.4)
    many = Resumed(
        differing=list(differing),
        digests={"optim.state.w.exp_avg": "a"},
        deviations=[deviation, dataclasses.replace(deviation, largest=largest)],
        native_losses=[2.0, 1.9],
        restored_losses=[2.0, 1.91],
        distance=Distance(largest=2e-5, rms=1e-6),
        travelled=Distance(largest=3e-3, rms=1e-3),
        certified_bound=bound,
        seconds={},
    )
    one = dataclasses.replace(many, digests={"optim.state.w.exp_avg": one_digest}, deviations=[deviation], differing=[])
    names = ("moments_raw", "moments_stored", "weights_raw", "weights_stored", "coordinates", "escapes")
    saved = Saved(
        parameters=3_307_008,
        first_loss=5.5,
        last_loss=2.1,
        seconds={},
        sizes=dict(zip(names, (26_456_064, 5_000_000, 13_228_032, 13_000_000, 3_307_008, 12), strict=True)),
        certified_bound=bound,
        rounding_horizon=horizon,
        bound_at_100k=far,
        warnings=["rank 0: something was stored exactly"],
    )
    return Outcome(
        job=Job(certified="/x/certified", plain="/x/plain", steps=120, more=2, guard=Guard()),
        saved=saved,
        many=[many, many, many],
        one=one,
        verified=Report(certificates=4),
        plain_bytes=40_000_000,
        certified_bytes=18_000_000,
        seconds={},
    )


def test_a_good_outcome_is_rendered_in_80_columns_of_ascii():
    lines = render(outcome(), keep="/x")
    assert all(len(line) <= 80 and line.isascii() for line in lines)
    text = "\n".join(lines)
    assert "  Adam moments, guarded                 26,456,064     5,000,000    18.9%" in text
    assert "float32 rounding included for 1,559 steps, 0.0436 at step 100,000" in text
    assert "Note: rank 0: something was stored exactly" in text
    assert "guarddcp inspect /x/certified" in text
    assert lines[-1] == "Promise kept: no update deviates by more than 0.004 lr, 0.01 lr allowed."


def test_steps_after_the_horizon_are_not_promised():
    beyond = outcome(largest=0.5, horizon=1, far=math.inf)
    assert beyond.violations() == []
    assert (beyond.promised, beyond.later) == (1, 0.003)
    assert json.loads(json.dumps(beyond.as_dict(), allow_nan=False))["bound_at_100k"] is None
    text = "\n".join(render(beyond, keep=None))
    assert "float32 rounding included for 1 steps, nothing is promised after them" in text
    assert "steps 121 to 121: largest deviation" in text


def test_nothing_guarded_is_said():
    text = "\n".join(render(outcome(bound=None, horizon=None, far=None), keep=None))
    assert "nothing could be guarded: every moment is stored exactly" in text
    assert "certified bound" not in text


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"largest": 0.0101}, "an update deviates by 0.0101 lr, the tolerance is 0.01 lr"),
        ({"largest": math.inf}, "an update deviates by inf lr"),
        ({"bound": 0.02}, "the restore certifies 0.02 lr, the tolerance is 0.01 lr"),
        ({"differing": ["model.head.weight"]}, "1 values besides the moments were not restored bit for bit"),
        ({"one_digest": "b"}, "1 rank and 3 ranks restored different moments"),
    ],
)
def test_every_broken_promise_is_named_and_fails(monkeypatch, capsys, figures, words):
    monkeypatch.setattr(demo, "_measure", lambda *_: outcome(**figures))
    assert run_demo(guard=Guard(), keep=None, steps=120, more=2, size="tiny", as_json=False) == 1
    shown = capsys.readouterr().out
    assert f"PROMISE BROKEN: {words}" in shown
    assert "Promise kept" not in shown


def test_progress_rewrites_one_line_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream, seconds = Terminal(), {}
    progress = Progress(stream)
    with progress.phase("train", seconds):
        progress(("train", 9, 9, 1.5))
    first, rewritten, last = (part.rstrip() for part in stream.getvalue().split("\r")[1:])
    assert (first, rewritten) == ("  train ...", "  train: step 9 of 9, loss 1.5000")
    assert last.startswith("train: 0.")
    assert stream.getvalue().endswith("\n")


def test_a_failed_phase_is_said_and_not_timed():
    stream, seconds = io.StringIO(), {}
    with pytest.raises(OSError, match="disk full"), Progress(stream).phase("save", seconds):
        raise OSError("disk full")
    assert stream.getvalue() == "  save ...\nsave: failed\n"
    assert seconds == {}


def test_progress_elsewhere_is_a_line_now_and_then():
    stream = io.StringIO()
    progress = Progress(stream, every=60)
    for step in range(1, 10):
        progress(("train", step, 9, 1.5))
    assert stream.getvalue() == "  train: step 1 of 9, loss 1.5000\n  train: step 9 of 9, loss 1.5000\n"
