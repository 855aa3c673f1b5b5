"""Which moments are coded, under which certificate, and which are exact, with what is said about it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import adam, assert_same, blank, round_trip, said, update_gap

from guarddcp import Adam, Guard, GuardBug, GuardedWriter, verify
from guarddcp.dcp import saving

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TOLERANCE = 0.01
COORDINATES = 40 * 40 + 200


def check_guarded(path: Path, state: dict[str, Any], *, kind: Any = torch.optim.AdamW, writer: Any = None) -> Any:
    """Save and load; all moments must be coded within tolerance, the rest exact. Returns the save's report."""
    loaded, report = round_trip({"optim": state}, path, writer=writer)
    loaded = loaded["optim"]
    assert report.moments.coordinates == sum(entry["exp_avg"].numel() for entry in state["state"].values())
    assert 0.0 < report.certified_bound <= (writer or {}).get("guard", Guard()).tolerance
    assert update_gap(state, loaded, kind) <= report.certified_bound
    assert_same(loaded["param_groups"], state["param_groups"])
    for number, entry in state["state"].items():
        assert_same(loaded["state"][number]["step"], entry["step"])
    assert verify(path).certified_bound == report.certified_bound
    return report


def check_exact(path: Path, state: dict[str, Any], *, writer: Any = None) -> Any:
    """Save and load; everything must come back bit for bit, without a certificate. Returns the save's report."""
    loaded, report = round_trip({"optim": state}, path, writer=writer)
    assert_same(loaded["optim"], state)
    assert report.moments.coordinates == 0
    assert report.certified_bound is None
    assert verify(path).ok
    return report


# ---- rules and hyperparameters


@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"betas": (0.0, 0.99)},
        {"betas": (0.95, 0.95)},
        {"betas": (torch.tensor(0.9), torch.tensor(0.999))},
        {"lr": 0.0},
        {"lr": torch.tensor(1e-3)},
        {"eps": 1e-3},
        {"weight_decay": 0.3},
        {"maximize": True},
        {"foreach": True},
        {"fused": True},
        {"steps": 1},
        {"steps": 40},
    ],
    ids=lambda hyper: "-".join(hyper) or "default",
)
def test_adamw_is_guarded(tmp_path: Path, hyper: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    report = check_guarded(tmp_path / "ck", adam(**hyper).state_dict())
    assert report.horizon == "all"
    assert not said(caplog)


def test_plain_adam_is_guarded(tmp_path: Path) -> None:
    check_guarded(tmp_path / "ck", adam(torch.optim.Adam).state_dict(), kind=torch.optim.Adam)


def test_capturable_state_is_guarded(tmp_path: Path) -> None:
    state = adam().state_dict()  # torch steps such an optimizer on accelerators only; it may be saved anywhere
    state["param_groups"][0]["capturable"] = True
    loaded, report = round_trip(state, tmp_path / "ck")
    assert loaded["param_groups"][0]["capturable"] is True
    assert report.moments.coordinates == COORDINATES


def test_every_group_has_its_own_rule(tmp_path: Path) -> None:
    state = adam(groups=[{"betas": (0.9, 0.99), "eps": 1e-6}, {"betas": (0.8, 0.95), "maximize": True}]).state_dict()
    report = check_guarded(tmp_path / "ck", state)
    assert report.certificates == 2


def test_eps_zero_is_guarded_for_a_finite_horizon(tmp_path: Path) -> None:
    writer = {"guard": Guard(horizon=10)}
    report = check_guarded(tmp_path / "ck", adam(eps=0.0).state_dict(), writer=writer)
    assert report.rounding_horizon == 10


@pytest.mark.parametrize("tolerance", [0.2, 0.05, 1e-3, 1e-4])
def test_tolerances(tmp_path: Path, tolerance: float) -> None:
    writer = {"guard": Guard(tolerance=tolerance)}
    report = check_guarded(tmp_path / "ck", adam(steps=20).state_dict(), writer=writer)
    assert report.certified_bound > tolerance / 2


def test_coupled_weight_decay_is_guarded_for_one_step_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = adam(torch.optim.Adam, weight_decay=0.1).state_dict()
    report = check_guarded(tmp_path / "ck", state, kind=torch.optim.Adam)
    (line,) = said(caplog)
    assert (
        "horizon: proved for horizon 1 only (coupled weight decay) [optim.state.0.exp_avg, optim.state.1.exp_" in line
    )
    assert {entry.rounding_horizon for entry in report.parameters.values()} == {1}
    assert report.bound_at_100k == math.inf


def test_given_rule_replaces_the_group(tmp_path: Path) -> None:
    state = adam(betas=(0.9, 0.95)).state_dict()
    del state["param_groups"][0]["betas"]
    check_exact(tmp_path / "without", state)
    for name in ("without betas", "with other betas"):
        path = tmp_path / name
        rule = Adam(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
        metadata = dcp.save({"optim": state}, storage_writer=GuardedWriter(path, rule=rule))
        assert metadata.guard_report.moments.coordinates == COORDINATES
        assert verify(path).ok  # the stored group does not contradict what the caller said
        state["param_groups"][0]["betas"] = (0.9, 0.999)


def test_live_optimizer_confirms_the_type(tmp_path: Path) -> None:
    optimizer = adam()
    report = check_guarded(tmp_path / "ck", optimizer.state_dict(), writer={"optimizer": optimizer})
    assert report.parameters["0"].evidence == "proved"


# ---- exact, and said once


class Mine(torch.optim.AdamW):
    """May do anything with its moments."""


def without(state: dict[str, Any], name: str) -> dict[str, Any]:
    del state["param_groups"][0][name]
    return state


def with_step(state: dict[str, Any], step: float) -> dict[str, Any]:
    for entry in state["state"].values():
        entry["step"].fill_(step)
    return state


def with_betas(*betas: float) -> dict[str, Any]:
    state = adam().state_dict()
    state["param_groups"][0]["betas"] = betas
    return state


EXACT = {
    "amsgrad": (lambda: adam(amsgrad=True).state_dict(), {}, "the state holds max_exp_avg_sq (amsgrad)"),
    "bf16": (lambda: adam(dtype=torch.bfloat16).state_dict(), {}, "moments of bfloat16; only float32 pairs"),
    "fp64": (lambda: adam(dtype=torch.float64).state_dict(), {}, "moments of float64; only float32 pairs"),
    "radam": (lambda: adam(torch.optim.RAdam).state_dict(), {}, "the param group does not say amsgrad"),
    "nadam": (lambda: adam(torch.optim.NAdam).state_dict(), {}, "this one holds ['exp_avg', 'exp_avg_sq', 'mu_product"),
    "adamax": (lambda: adam(torch.optim.Adamax).state_dict(), {}, "exp_avg and exp_avg_sq of one chunk were not both"),
    "subclass": (lambda: adam(Mine).state_dict(), {"optimizer": Mine}, "is neither torch.optim.Adam nor AdamW itself"),
    "no betas": (lambda: without(adam().state_dict(), "betas"), {}, "the param group does not say betas"),
    "betas": (lambda: with_betas(0.9, 1.0), {}, "beta2 must be in (0, 1), not 1.0"),
    "step 0": (
        lambda: with_step(adam().state_dict(), 0),
        {},
        "step should be a whole number of at least 1, not tensor",
    ),
    "tolerance": (
        lambda: adam().state_dict(),
        {"guard": Guard(tolerance=1e-7)},
        "the smallest tolerance that would do",
    ),
    "horizon": (lambda: adam(betas=(0.9, 0.8)).state_dict(), {}, "have b1^2 >= b2; horizon="),
    "eps": (lambda: adam(eps=0.0).state_dict(), {}, "use an eps of at least 2^-40 (9.1e-13) or a finite horizon"),
}


@pytest.mark.parametrize("case", EXACT)
def test_what_cannot_be_guarded_is_exact_and_said_once(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, writer, text = EXACT[case]
    if isinstance(writer.get("optimizer"), type):
        writer = {"optimizer": adam(writer["optimizer"])}
    report = check_exact(tmp_path / "ck", make(), writer=writer)
    (line,) = said(caplog)
    assert text in line
    assert ": stored exactly: " in line
    assert "[optim.state.0.exp_avg, " in line
    assert report.warnings[0] in line
    assert text in report.parameters["0"].reason


def test_a_bug_in_the_certificate_loses_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def choose_certificate(*args: Any) -> Any:
        raise GuardBug("a chosen cell does not prove its tolerance")

    monkeypatch.setattr(saving, "choose_certificate", choose_certificate)
    report = check_exact(tmp_path / "ck", adam().state_dict())
    assert "bug: stored exactly: GuardBug: a chosen cell does not prove its tolerance" in report.warnings[0]
    assert any(record.levelname == "ERROR" and record.name == "guarddcp" for record in caplog.records)


def test_one_warning_speaks_for_pairs_of_all_sizes_of_q(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = adam(shapes=((30, 30),) * 4).state_dict()
    for number, q in enumerate((0.01, 0.5, 3.0, 100.0)):
        state["state"][number]["exp_avg"] = q * state["state"][number]["exp_avg_sq"].sqrt()
    check_exact(tmp_path / "ck", state, writer={"guard": Guard(tolerance=1e-7)})
    (line,) = said(caplog)
    smallest = float(line.partition("that would do is ")[2].split()[0])
    assert "[optim.state.0.exp_avg, optim.state.1.exp_avg, optim.state.2.exp_avg and 1 more]" in line
    caplog.clear()
    round_trip(state, tmp_path / "again", writer={"guard": Guard(tolerance=smallest)})
    assert not said(caplog)  # the remedy is one for all of them


def test_one_warning_speaks_for_several_causes_of_a_kind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report = check_exact(tmp_path / "ck", adam(groups=[{"betas": (0.9, 0.8)}, {"betas": (0.9, 0.7)}]).state_dict())
    (line,) = said(caplog)
    keys = "[optim.state.0.exp_avg, optim.state.1.exp_avg]"
    assert line.endswith(f"{keys} (causes of this kind: 2; `reason` in the report names each)")
    for number, betas in enumerate(("(0.9, 0.8)", "(0.9, 0.7)")):
        assert f"betas {betas} have b1^2 >= b2" in report.parameters[str(number)].reason


def test_exact_codec_is_asked_for_and_needs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report = check_exact(tmp_path / "ck", adam().state_dict(), writer={"guard": Guard(codec="exact")})
    assert not said(caplog)
    assert report.parameters["0"].reason == "codec: the guard asks for exact storage"


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RMSprop", "Rprop", "ASGD", "Adafactor"])
def test_other_optimizers_of_torch_are_exact(tmp_path: Path, kind: str) -> None:
    check_exact(tmp_path / "ck", adam(getattr(torch.optim, kind)).state_dict())


def test_a_whole_optimizer_in_one_value_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    writer = GuardedWriter(tmp_path / "ck")
    dcp.save({"optim": adam().state_dict(), "x": torch.ones(3)}, storage_writer=writer, planner=planner)
    (line,) = said(caplog)
    assert line.endswith("a whole optimizer is one value; flatten_state_dict=True would show them [optim]")


# ---- values of moments

NASTY = (math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, -1e-45, 1e-38, 3.4e38, -1.0)


def test_nan_and_inf_come_back_bit_for_bit(tmp_path: Path) -> None:
    state = adam().state_dict()
    m, v = (state["state"][0][name].view(-1) for name in ("exp_avg", "exp_avg_sq"))
    values = torch.tensor(NASTY)
    m[:100] = values.repeat_interleave(10)
    v[:100] = values.repeat(10)
    m.view(torch.int32)[50] = -1  # a NaN with a payload
    loaded, report = round_trip(state, tmp_path / "ck")
    after_m, after_v = (loaded["state"][0][name].view(-1) for name in ("exp_avg", "exp_avg_sq"))
    for at in range(100):
        zero = m[at] == 0 and v[at] == 0 and not torch.signbit(v[at])
        if not (math.isfinite(m[at]) and math.isfinite(v[at]) and 1e-30 < v[at] < 1e30) and not zero:
            assert_same((after_m[at], after_v[at]), (m[at], v[at]), str(at))
    causes = report.moments.escapes_by_cause
    assert report.moments.escapes == sum(causes.values()) == report.parameters["0"].escapes
    assert causes["not_finite"] == sum(not math.isfinite(x) or not math.isfinite(y) for x in NASTY for y in NASTY)
    assert {"negative_v", "zero_v", "small_v"} <= set(causes)


def test_moments_full_of_nan_or_zero(tmp_path: Path) -> None:
    state = adam(shapes=((40, 40), (40, 40))).state_dict()
    for name in ("exp_avg", "exp_avg_sq"):
        state["state"][0][name].fill_(math.nan)
        state["state"][1][name].zero_()
    loaded, report = round_trip(state, tmp_path / "ck")
    assert_same(loaded, state)
    assert report.parameters["0"].escapes == 1600
    assert report.parameters["1"].escapes == 0


def test_moments_of_any_memory_layout(tmp_path: Path) -> None:
    state = adam(shapes=((60, 50), (8, 3, 20, 20), (300,))).state_dict()
    dense, _ = round_trip(state, tmp_path / "dense")
    for target in (state, blank(state)):
        for name in ("exp_avg", "exp_avg_sq"):
            entries = target["state"]
            entries[0][name] = entries[0][name].T.contiguous().T
            entries[1][name] = entries[1][name].to(memory_format=torch.channels_last)
            wide = torch.zeros(300, 2)
            wide[:, 1] = entries[2][name]
            entries[2][name] = wide[:, 1]
        loaded, _ = round_trip(state, tmp_path / str(id(target)), target=target if target is not state else None)
        assert_same(loaded, dense)
