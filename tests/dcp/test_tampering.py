"""Certificates that do not prove what they say, or speak of another optimizer; stored bytes that want to run code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import adam, assert_same, blank, failure

from guarddcp import Adam, Guard, GuardedReader, GuardedWriter, verify
from guarddcp.certificate import Certificate
from guarddcp.container import manifest as manifests
from guarddcp.container.layout import MANIFEST_NAME
from guarddcp.container.manifest import Manifest
from guarddcp.container.records import ValueEntry
from guarddcp.dcp.groups import Guarded, OptimizerGroups
from guarddcp.dcp.opening import read_manifest
from guarddcp.errors import FormatError, GuardError, ToleranceError
from guarddcp.storage.store import Store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(**hyper: Any) -> dict[str, Any]:
    return {"optim": adam(shapes=((40, 40),), **hyper).state_dict(), "w": torch.ones(5000), "epoch": 3}


def saved(path: Path, live: dict[str, Any] | None = None, **writer: Any) -> Path:
    dcp.save(state() if live is None else live, storage_writer=GuardedWriter(path, **writer))
    return path


def rewrite(path: Path, change: Callable[[Manifest], None]) -> None:
    """Change a parsed manifest and write it back, with a checksum that fits."""
    manifest = read_manifest(Store(path))
    change(manifest)
    (path / MANIFEST_NAME).write_bytes(manifests.to_bytes(manifest))


def with_certificate(path: Path, **fields: Any) -> None:
    def change(manifest: Manifest) -> None:
        (old,) = manifest.certificates
        cell = {name: fields.pop(name) for name in ("levels_per_octave", "delta", "q_max") if name in fields}
        rule = {name: fields.pop(name) for name in ("betas", "eps", "weight_decay") if name in fields}
        new = dataclasses.replace(old, **fields)
        new = dataclasses.replace(new, cell=dataclasses.replace(old.cell, **cell))
        manifest.certificates[:] = [dataclasses.replace(new, rule=dataclasses.replace(old.rule, **rule))]

    rewrite(path, change)


def certificate_of(path: Path) -> Certificate:
    (certificate,) = read_manifest(Store(path)).certificates
    return certificate


# ---- proofs

FIELDS: dict[str, Callable[[Certificate], dict[str, Any]]] = {
    "wider steps of q": lambda c: {"delta": 2 * c.cell.delta},
    "wider range of q": lambda c: {"q_max": 2 * c.cell.q_max},
    "fewer levels of v": lambda c: {"levels_per_octave": c.cell.levels_per_octave // 2},
    "smaller v": lambda c: {"v_min": c.v_min / 2**60 if c.v_min > 2**-60 else 2.0**-149},
    "narrower tolerance": lambda c: {"tolerance": c.tolerance / 2},
    "smaller bound": lambda c: {"bound": c.bound * 0.9},
    "larger bound": lambda c: {"bound": c.bound * 1.1},
    "longer rounding": lambda c: {"rounding_horizon": 100_000},
    "other betas": lambda c: {"betas": (0.5, 0.9)},
    "another step": lambda c: {"step": c.step + 1},
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_certificate_that_proves_nothing_stops_everything(tmp_path: Path, field: str) -> None:
    path = saved(tmp_path / "ck")
    with_certificate(path, **FIELDS[field](certificate_of(path)))
    for level in ("full", "before", "checksum"):
        target = blank(state())
        error = failure(dcp.load, target, storage_reader=GuardedReader(path, verify=level))
        assert type(error) is ToleranceError, error
        assert str(error).startswith("optim.state.0.exp_avg")
        assert "Nothing was restored" in str(error)
        assert_same(target, blank(state()))
    with pytest.raises(ToleranceError, match=r"optim\.state\.0\.exp_avg"):
        verify(path)


def test_illegal_constants_are_refused_when_the_manifest_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck")
    with_certificate(path, betas=(0.9, 1.0))
    error = failure(dcp.load, blank(state()), storage_reader=GuardedReader(path))
    assert type(error) is FormatError
    assert "certificate 0" in str(error)
    with pytest.raises(FormatError, match="certificate 0"):
        verify(path)


def test_only_the_certificates_that_a_load_needs_are_proved(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck")
    with_certificate(path, bound=certificate_of(path).bound * 1.1)
    target = {"w": torch.zeros(5000)}
    dcp.load(target, storage_reader=GuardedReader(path))
    assert_same(target["w"], torch.ones(5000))
    target = {"optim": {"state": {"0": {"exp_avg_sq": torch.zeros(40, 40)}}}}
    assert type(failure(dcp.load, target, storage_reader=GuardedReader(path))) is ToleranceError


# ---- the optimizer beside it


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"betas": (0.9, 0.99)}, "betas=(0.9, 0.99), eps=1e-08"),
        ({"eps": 1e-6}, "eps=1e-06"),
        ({"weight_decay": 0.5}, "weight_decay=0.5"),
        ({"maximize": True}, "maximize=True"),
        ({}, "at step 4"),
    ],
    ids=["betas", "eps", "weight_decay", "maximize", "step"],
)
def test_verification_holds_certificates_against_groups_and_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], text: str
) -> None:
    def wrong(self: Any, m_index: Any) -> Any:
        found = right(self, m_index)
        assert isinstance(found, Guarded)
        return Guarded(dataclasses.replace(found.rule, **change), found.step + (not change))

    right = OptimizerGroups.rule_for
    with monkeypatch.context() as patch:
        patch.setattr(OptimizerGroups, "rule_for", wrong)
        path = saved(tmp_path / "ck")
    with pytest.raises(ToleranceError) as caught:
        verify(path)
    where, _, rest = str(caught.value).partition("the certificate is not that of the optimizer stored in this")
    assert "optim.state.0.exp_avg" in where
    assert text in rest.partition("got")[2]


def test_a_certificate_without_its_optimizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = state()
    del live["optim"]["param_groups"]
    with monkeypatch.context() as patch:
        rule = Adam(betas=(0.9, 0.999), eps=1e-8)
        patch.setattr(OptimizerGroups, "rule_for", lambda self, m_index: Guarded(rule, 3))
        path = saved(tmp_path / "ck", live)
    with pytest.raises(ToleranceError, match=r"expected none \(no param group in the state dict lists"):
        verify(path)


def test_the_step_of_a_given_rule_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Adam(betas=(0.9, 0.95), eps=1e-8)
    assert verify(saved(tmp_path / "right", rule=rule)).ok
    with monkeypatch.context() as patch:
        patch.setattr(OptimizerGroups, "rule_for", lambda self, m_index: Guarded(rule, 9))
        path = saved(tmp_path / "wrong", rule=rule)
    with pytest.raises(ToleranceError, match=r"at step 3; got .* at step 9"):
        verify(path)


# ---- code in stored bytes

EXPLODED: list[str] = []


def explode(what: str) -> frozenset[str]:
    EXPLODED.append(what)
    return frozenset([what])  # has no plain form


class Bomb:
    def __reduce__(self) -> Any:
        return explode, ("a value",)


class BombTensor(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return explode, ("a tensor",)


@pytest.fixture
def armed(tmp_path: Path) -> Path:
    live = {"value": Bomb(), "tensor": torch.ones(5).as_subclass(BombTensor)}
    path = saved(tmp_path / "ck", live)  # saving may look at what it has just pickled
    EXPLODED.clear()
    return path


@pytest.mark.parametrize("key", ["value", "tensor"])
@pytest.mark.parametrize("level", ["full", "before"])
def test_pickles_are_refused_and_never_run(armed: Path, key: str, level: Any) -> None:
    target = {key: None if key == "value" else torch.zeros(5)}
    error = failure(dcp.load, target, storage_reader=GuardedReader(armed, verify=level))
    assert type(error) is GuardError
    assert str(error).startswith(f"{key}: stored as pickle, and torch's safe unpickler refuses it (Unsupported ")
    assert verify(armed).ok
    assert EXPLODED == []


def test_a_pickle_that_is_marked_plain_is_no_plain_value(armed: Path) -> None:
    def change(manifest: Manifest) -> None:
        manifest.entries[:] = [
            dataclasses.replace(entry, kind="plain") if isinstance(entry, ValueEntry) else entry
            for entry in manifest.entries
        ]

    rewrite(armed, change)
    error = failure(dcp.load, {"value": None}, storage_reader=GuardedReader(armed, allow_pickle=True))
    assert type(error) is FormatError
    assert "plain value: not JSON" in str(error)
    with pytest.raises(GuardError, match="plain value: not JSON"):
        verify(armed)
    assert EXPLODED == []


def test_permission_runs_it(armed: Path) -> None:
    target = {"value": None}
    dcp.load(target, storage_reader=GuardedReader(armed, allow_pickle=True))
    assert target["value"] == frozenset(["a value"])
    assert EXPLODED == ["a value"]


def test_planner_data_in_the_manifest_is_no_pickle(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck")
    rewrite(path, lambda manifest: setattr(manifest, "planner_data", "cos\nsystem\n(S'true'\ntR."))
    error = failure(dcp.load, blank(state()), storage_reader=GuardedReader(path))
    assert type(error) is FormatError
    with pytest.raises(FormatError, match="plain value: not JSON"):
        verify(path)


def test_a_codec_without_certificates_has_none_to_tamper_with(tmp_path: Path) -> None:
    path = saved(tmp_path / "ck", guard=Guard(codec="exact"))
    assert read_manifest(Store(path)).certificates == []
    assert verify(path).certificates == 0
