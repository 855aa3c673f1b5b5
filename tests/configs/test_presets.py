"""The guard presets: each loads, says what it promises and costs, and is what its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from guarddcp.config import Guard

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = sorted(CONFIGS.glob("*.toml"))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_preset_loads_and_is_headed_by_promise_and_cost(path):
    Guard.load(path)
    lines = path.read_text(encoding="ascii").splitlines()
    head = lines[: lines.index("")]
    assert all(line.startswith("#") for line in head)
    assert any(line.startswith("# Promise: ") for line in head)
    assert any(line.startswith("# Cost: ") for line in head)


def test_presets_are_what_their_names_say():
    guards = {path.stem: Guard.load(path) for path in PRESETS}
    assert set(guards) == {"default", "exact", "first_step", "loose", "tight"}
    assert guards["default"] == Guard()
    assert guards["exact"].codec == "exact"
    assert guards["first_step"].horizon == 1
    assert guards["tight"].tolerance < guards["default"].tolerance < guards["loose"].tolerance


def test_constraints_pin_torch():
    lines = (CONFIGS / "constraints.txt").read_text(encoding="ascii").splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["torch==2.13.0"]
