"""Saves on N ranks restored on M: everything but the moments bit for bit, the moments inside their certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from ranks import run_ranks

from guarddcp import Guard, verify

TOLERANCE = 0.01


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for key, item in tree.items() for k, v in flatten(item, f"{prefix}{key}/").items()}
    return {prefix: tree}


def is_moment(key: str) -> bool:
    return key.rstrip("/").endswith(("exp_avg", "exp_avg_sq"))


def assert_restored(saved: Any, loaded: Any, *, exact: bool) -> None:
    saved, loaded = flatten(jobs.undump(saved)), flatten(jobs.undump(loaded))
    assert saved.keys() == loaded.keys()
    for key, value in saved.items():
        if not isinstance(value, torch.Tensor):
            assert value == loaded[key], key
        elif exact or not is_moment(key):
            assert value.dtype == loaded[key].dtype
            assert torch.equal(value, loaded[key]), key
        else:
            assert torch.allclose(value, loaded[key], rtol=0.1, atol=float(value.abs().max()) * 0.05), key


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, Any, Any]]:
    """One FSDP checkpoint per number of saving ranks: (path, full state of rank 0, report)."""
    root = tmp_path_factory.mktemp("reshard")
    saved = {}
    for n in (1, 2, 3, 4):
        path = str(root / f"from{n}")
        state, report = run_ranks(n, jobs.save, path, "fsdp", False, {})[0]
        saved[n] = (path, state, report)
    return saved


@pytest.mark.parametrize("load_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("save_ranks", [1, 2, 3, 4])
def test_fsdp_from_n_to_m(checkpoints: dict[int, Any], save_ranks: int, load_ranks: int) -> None:
    path, saved, report = checkpoints[save_ranks]
    for loaded in run_ranks(load_ranks, jobs.load, path, "fsdp", False, {}):
        assert_restored(saved, loaded, exact=False)
    assert 0.0 < report["certified_bound"] <= TOLERANCE
    assert report["moments"]["coordinates"] > 3000


@pytest.mark.parametrize("save_ranks", [1, 2, 3, 4])
def test_a_saved_checkpoint_verifies(checkpoints: dict[int, Any], save_ranks: int) -> None:
    path, _, report = checkpoints[save_ranks]
    again = verify(path)
    assert again.ok
    assert again.moments.coordinates == report["moments"]["coordinates"]
    assert again.certificates >= 1


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(("save_mesh", "load_mesh"), [("ddp", "fsdp"), ("hsdp", "tp"), ("tp", "fsdp"), ("fsdp", "ddp")])
def test_from_mesh_to_mesh(tmp_path: Path, save_mesh: str, load_mesh: str, flat: bool) -> None:
    path = str(tmp_path / "ck")
    saved, report = run_ranks(4, jobs.save, path, save_mesh, flat, {})[0]
    for loaded in run_ranks(4, jobs.load, path, load_mesh, flat, {}):
        assert_restored(saved, loaded, exact=False)
    assert report["moments"]["coordinates"] > 3000
    assert verify(path).ok


def test_exact_codec_is_bit_exact_everywhere(tmp_path: Path) -> None:
    path = str(tmp_path / "ck")
    saved, report = run_ranks(2, jobs.save, path, "fsdp", False, {"guard": Guard(codec="exact")})[0]
    for loaded in run_ranks(3, jobs.load, path, "fsdp", False, {}):
        assert_restored(saved, loaded, exact=True)
    assert report["certified_bound"] is None
    assert report["moments"]["coordinates"] == 0


@pytest.mark.parametrize("verify_level", ["full", "before", "checksum"])
def test_verify_levels_restore_alike(checkpoints: dict[int, Any], verify_level: str) -> None:
    path, saved, _ = checkpoints[2]
    for loaded in run_ranks(2, jobs.load, path, "fsdp", False, {"verify": verify_level}):
        assert_restored(saved, loaded, exact=False)
