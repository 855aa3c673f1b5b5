"""Attacks that once broke a promise, each as the test that would have seen it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from guarddcp import Adam, Guard, GuardedReader, GuardedWriter, GuardError, verify
from guarddcp.certificate import certify
from guarddcp.codecs import ratio
from guarddcp.codecs.predictors import RowCol
from guarddcp.codecs.view import Layout, View


def trained(seed: int, scheduler: bool = False) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(40, 30))
    optimizer = torch.optim.AdamW([weight], lr=1e-3)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=20) if scheduler else None
    for _ in range(3):
        weight.grad = torch.randn(40, 30)
        optimizer.step()
        if cycle is not None:
            cycle.step()
    return optimizer


def test_moments_under_a_scheduler_of_beta1_are_exact(tmp_path: Path) -> None:
    state = {"optim": trained(0, scheduler=True).state_dict()}
    writer = GuardedWriter(tmp_path / "ck")
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert writer.report is not None
    assert writer.report.moments.coordinates == 0
    assert "scheduled-betas: a scheduler cycles beta1" in writer.report.parameters["0"].reason


def test_one_reader_on_two_threads_keeps_its_loads_apart(tmp_path: Path) -> None:
    for seed in (0, 1):
        writer = GuardedWriter(tmp_path / str(seed), Guard(codec="exact"))
        dcp.save({"x": torch.full((3000,), float(seed))}, storage_writer=writer, no_dist=True)
    reader = GuardedReader(tmp_path / "0")
    wrong: list[object] = []

    def load(seed: int) -> None:
        for _ in range(25):
            target = {"x": torch.full((3000,), -1.0)}
            try:
                dcp.load(target, checkpoint_id=str(tmp_path / str(seed)), storage_reader=reader, no_dist=True)
            except BaseException as error:
                wrong.append(error)
            if not bool((target["x"] == seed).all()):
                wrong.append(seed)

    threads = [threading.Thread(target=load, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_fit_keeps_nothing_per_column_where_columns_have_no_mean() -> None:
    rule = Adam(betas=(0.9, 0.999), eps=1e-8)
    certificate = certify(rule, 500, tolerance=0.01, horizon="all", rounding_share=0.05, q_max=2.0)
    params = ratio.params_of(certificate)
    v = np.full((1, 4096), 1e-8, np.float32)
    long_row = Layout((8192,), View((0,), 0), 4096)
    few_rows = Layout((2, 4096), View((0, 1), 1), 4096)
    for layout in (long_row, few_rows):
        fit = RowCol.fit_frame(v, layout.frame(0), layout, params)
        assert fit.sums.size == fit.counts.size == 0


def test_a_folder_in_place_of_the_manifest_is_named(tmp_path: Path) -> None:
    (tmp_path / "ck" / ".metadata").mkdir(parents=True)
    with pytest.raises(GuardError, match=r"ck/\.metadata: the manifest cannot be read: IsADirectoryError"):
        verify(tmp_path / "ck")
