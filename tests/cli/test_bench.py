"""`bench codec` at a tiny size: its figures are there and make sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from guarddcp.cli.bench import machine, render
from guarddcp.cli.main import main


@pytest.fixture
def state(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    v = torch.exp(torch.randn(64, 96, generator=generator) - 18)
    m = v.sqrt() * torch.randn(64, 96, generator=generator) * 0.4
    moments = {"exp_avg": {"w": m, "b": torch.zeros(8)}, "exp_avg_sq": {"w": v, "b": torch.zeros(8)}}
    settings = {"step": 500, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "lr": 1e-3}
    torch.save(moments | settings, tmp_path / "state.pt")
    return tmp_path / "state.pt"


def test_figures_of_a_tiny_state(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "codec", "--state", str(state), "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    (found,) = outcome["states"]
    assert found["coordinates"] == 64 * 96 + 8
    assert 0.1 < found["sizes"]["0.05"]["stored_over_raw"] < found["sizes"]["0.01"]["stored_over_raw"] < 0.4
    assert found["sizes"]["0.01"]["certified_bound"] <= 0.01
    assert all(1.0 <= ratio < 1.002 for ratio in found["bound_over_attained"].values())
    assert all(found["speed"][name] > 0 for name in ("encode_over_copy", "decode_over_copy", "two_threads_over_one"))
    assert "encode with self-check" in "\n".join(render(outcome))
    assert machine()["cores"] >= 1
