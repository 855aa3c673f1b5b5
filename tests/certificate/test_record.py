"""Certificates: what is made, what is refused, what a reader can prove again (NOTES 13)."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guarddcp.certificate import (
    Adam,
    Uncertifiable,
    bound_at,
    c_inf,
    certify,
    from_plain,
    prove,
    q_limit,
    to_plain,
)
from guarddcp.errors import FormatError, GuardError, ToleranceError

RULE = Adam(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


def make(rule=RULE, step=141, tolerance=0.01, horizon="all", share=0.05, q_max=3.0):
    return certify(rule, step, tolerance=tolerance, horizon=horizon, rounding_share=share, q_max=q_max)


rules = st.builds(
    Adam,
    betas=st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 0.9999)),
    eps=st.sampled_from([0.0, 1e-15, 1e-12, 1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    decoupled_weight_decay=st.sampled_from([True, False, None]),
    maximize=st.booleans(),
)


def made_or_remedied(rule, step, tolerance, horizon, q_max):
    """The certificate, or the one that the refusal says would do; at tolerance 0.5 if it names nothing."""
    try:
        return make(rule, step, tolerance, horizon, 0.05, q_max)
    except Uncertifiable as refused:
        remedy = refused.horizon, refused.smallest_tolerance
        if remedy == (None, None):
            return make(rule, step, 0.5, 1, 0.05, q_max)
        named = f"horizon={remedy[0]}" if remedy[0] else f"{remedy[1]:g}"
        if named not in str(refused):
            raise
        return make(rule, step, remedy[1] or tolerance, remedy[0] or horizon, 0.05, q_max)


@given(
    rules,
    st.integers(1, 2**24),
    st.sampled_from([1, 60, "all"]),
    st.sampled_from([0.2, 0.05, 0.01, 1e-3, 1e-4]),
    st.floats(0.01, 1.0),
)
def test_every_certificate_proves_itself_and_every_refusal_helps(rule, step, horizon, tolerance, share_of_q):
    q_max = share_of_q * q_limit(rule)
    cert = made_or_remedied(rule, step, tolerance, horizon, q_max)
    assert prove(cert) <= cert.bound <= cert.tolerance * (1 - 1e-6)
    assert from_plain(json.loads(json.dumps(to_plain(cert)))) == cert
    if rule.weight_decay and rule.decoupled_weight_decay is not True:
        assert (cert.horizon, cert.rounding_horizon) == (1, 1)


@pytest.mark.parametrize("tolerance", [0.2, 0.1, 0.05, 0.02, 0.01, 1e-3, 1e-4])
@pytest.mark.parametrize("step", [1, 141, 10**6])
@pytest.mark.parametrize("horizon", [1, "all"])
def test_usual_tolerances_are_certified(tolerance, step, horizon):
    cert = make(Adam(betas=(0.9, 0.999), eps=1e-8), step, tolerance, horizon)
    assert 0.99 * tolerance < cert.bound < tolerance


@pytest.mark.parametrize(
    ("change", "step", "horizon", "reason", "text"),
    [
        ({"amsgrad": True}, 5, "all", "amsgrad", "amsgrad"),
        ({}, 0, "all", "step", r"step must be in 1\.\.2\^24"),
        ({}, 2**24 + 1, "all", "step", r"step must be in 1\.\.2\^24"),
        ({"betas": (1.0, 0.999)}, 5, "all", "hyperparameters", "beta1 must be in"),
        ({"eps": math.nan}, 5, "all", "hyperparameters", "eps must be in"),
        ({"weight_decay": math.inf}, 5, "all", "hyperparameters", "weight_decay must be finite"),
        ({"betas": (0.9, 1 - 1e-9)}, 5, "all", "coefficients", "rounds to 0 or 1"),
        ({"betas": (0.95, 0.9)}, 5, "all", "horizon", r"b1\^2 >= b2; horizon=\d+ would do"),
        ({}, 5, 2**17 + 1, "horizon", "use 'all' or at most 131072"),
        ({"eps": 0.0}, 5, "all", "eps", "finite horizon"),
    ],
)
def test_refusals_name_their_reason_and_remedy(change, step, horizon, reason, text):
    with pytest.raises(Uncertifiable, match=text) as caught:
        make(dataclasses.replace(RULE, **change), step, horizon=horizon)
    assert caught.value.reason == reason
    if caught.value.horizon is not None:
        assert make(dataclasses.replace(RULE, **change), step, horizon=caught.value.horizon).bound < 0.01


@pytest.mark.parametrize("horizon", [1, 60, "all"])
def test_the_smallest_tolerance_is_the_smallest(horizon):
    with pytest.raises(Uncertifiable, match="the smallest tolerance that would do is") as caught:
        make(tolerance=1e-6, horizon=horizon)
    smallest = caught.value.smallest_tolerance
    assert f"{smallest:g}" in str(caught.value)
    assert make(tolerance=smallest, horizon=horizon).bound < smallest
    with pytest.raises(Uncertifiable, match="smallest tolerance"):
        make(tolerance=smallest * 0.9, horizon=horizon)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"tolerance": 0.0}, "tolerance must be in"),
        ({"tolerance": 1.0}, "tolerance must be in"),
        ({"tolerance": math.nan}, "tolerance must be in"),
        ({"horizon": 0}, "horizon must be 'all' or an integer >= 1"),
        ({"horizon": True}, "horizon must be 'all' or an integer >= 1"),
        ({"horizon": "ever"}, "horizon must be 'all' or an integer >= 1"),
        ({"share": 0.95}, "rounding_share must be in"),
        ({"q_max": 0.0}, "q_max must be in"),
        ({"q_max": math.inf}, "q_max must be in"),
    ],
)
def test_illegal_requests_are_plain_value_errors(keywords, text):
    with pytest.raises(ValueError, match=text) as caught:
        make(**keywords)
    assert not isinstance(caught.value, Uncertifiable)


@pytest.mark.parametrize("decoupled", [False, None])
def test_coupled_or_unknown_weight_decay_degrades_to_one_step(decoupled):
    rule = dataclasses.replace(RULE, decoupled_weight_decay=decoupled)
    assert make(rule, horizon=50).horizon == 1
    assert make(dataclasses.replace(rule, weight_decay=0.0), horizon=50).horizon == 50


def test_odd_hyperparameters_are_certified():
    assert make(Adam(betas=(0.0, 0.999), eps=1e-8)).cell.w > 2.9  # m is free
    assert make(Adam(betas=(0.9, 0.999), eps=0.0), horizon=60).v_min > 2.0**-97
    assert make(Adam(betas=(0, 0.5), eps=1)).rule.betas == (0.0, 0.5)
    assert make(RULE, 2**24).step == 2**24
    assert make(Adam(betas=(0.95, 0.9), eps=1e-8), horizon=40).horizon == 40


def test_rounding_horizon_and_the_bound_beyond_it():
    cert = make(Adam(betas=(0.9, 0.999), eps=1e-8), 10**6)
    assert 1300 < cert.rounding_horizon < 1500
    assert bound_at(cert, cert.rounding_horizon) == pytest.approx(cert.bound, rel=1e-9)
    assert bound_at(cert, 1) < cert.bound < bound_at(cert, cert.rounding_horizon + 1)
    assert bound_at(cert, 100_000) == pytest.approx(0.043, abs=0.001)
    assert bound_at(cert, 2**17 + 1) == math.inf
    assert bound_at(make(horizon=60), 61) == math.inf
    with pytest.raises(ValueError, match="k must be at least 1"):
        bound_at(cert, 0)


def test_a_larger_rounding_share_buys_steps_with_bits():
    small, large = make(share=0.02), make(share=0.3)
    assert small.rounding_horizon < 0.2 * large.rounding_horizon
    assert small.cell.w * large.cell.levels_per_octave > large.cell.w * small.cell.levels_per_octave
    assert make(share=0.0).rounding_horizon == 1


def tampered(cert, field, value):
    if field in ("betas", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad"):
        return dataclasses.replace(cert, rule=dataclasses.replace(cert.rule, **{field: value}))
    if field in ("levels_per_octave", "delta", "q_max"):
        return dataclasses.replace(cert, cell=dataclasses.replace(cert.cell, **{field: value}))
    return dataclasses.replace(cert, **{field: value})


up = lambda x: float(np.nextafter(np.float32(x), np.float32(np.inf)))  # noqa: E731


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("betas", lambda c: (0.9, 0.9991)),
        ("betas", lambda c: (0.89, 0.999)),
        ("betas", lambda c: (0.9, 0.8)),
        ("step", lambda c: c.step + 1),
        ("step", lambda c: c.step - 1),
        ("tolerance", lambda c: 0.0099),
        ("levels_per_octave", lambda c: c.cell.levels_per_octave - 1),
        ("levels_per_octave", lambda c: c.cell.levels_per_octave + 1),
        ("delta", lambda c: up(c.cell.delta)),
        ("q_max", lambda c: up(c.cell.q_max)),
        ("eps", lambda c: 1e-9),
        ("eps", lambda c: 0.0),
        ("v_min", lambda c: 2.0**-127),
        ("bound", lambda c: c.bound * 0.999999),
        ("bound", lambda c: c.bound * 1.000001),
        ("rounding_horizon", lambda c: c.rounding_horizon + 1),
        ("rounding_horizon", lambda c: c.rounding_horizon - 1),
        ("decoupled_weight_decay", lambda c: False),
    ],
)
def test_a_changed_constant_is_not_proved(field, change):
    cert = make()
    with pytest.raises(ToleranceError):
        prove(tampered(cert, field, change(cert)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("betas", (1.0, 0.999)),
        ("betas", (0.9, math.nan)),
        ("eps", -1.0),
        ("weight_decay", math.inf),
        ("amsgrad", True),
        ("step", 0),
        ("step", 2**24 + 1),
        ("step", 141.0),
        ("tolerance", math.nan),
        ("tolerance", 1.5),
        ("horizon", 0),
        ("horizon", "some"),
        ("horizon", 60),
        ("rounding_share", -0.1),
        ("rounding_horizon", 2**17 + 1),
        ("rounding_horizon", True),
        ("levels_per_octave", 0),
        ("levels_per_octave", 65537),
        ("delta", 0.01),
        ("delta", math.nan),
        ("delta", -0.0078125),
        ("q_max", 0.0),
        ("q_max", math.inf),
        ("v_min", 1e-39 / 3),
        ("v_min", 2.0**121),
        ("v_max", 2.0**121),
        ("bound", math.nan),
        ("bound", 0.0),
    ],
)
def test_an_illegal_constant_is_a_format_error(field, value):
    with pytest.raises(FormatError, match=r"illegal .* in a certificate; expected .*; got"):
        prove(tampered(make(), field, value))


@given(
    st.sampled_from(["betas", "delta", "q_max", "levels_per_octave", "step", "rounding_horizon", "eps"]),
    st.floats(0.3, 3.0),
)
def test_no_change_that_loosens_the_bound_is_proved(field, factor):
    cert = make(Adam(betas=(0.9, 0.999), eps=1e-8), horizon="all")
    old = {**to_plain(cert), "betas": cert.rule.betas, "eps": cert.rule.eps, "q_max": 3.0, "delta": cert.cell.delta}[
        field
    ]
    if field == "betas":
        new = (0.9, 1 - 0.001 * factor)
    elif isinstance(old, int):
        new = max(1, int(old * factor))
    else:
        new = float(np.float32(old * factor))
    if new == old:
        return
    try:
        proved = prove(tampered(cert, field, new))
    except GuardError:
        return
    assert proved <= cert.bound <= proved * (1 + 1e-9)


def test_exact_floats_survive_the_plain_form():
    plain = to_plain(make())
    assert plain["delta"] == make().cell.delta.hex()
    assert all(value is None or isinstance(value, (str, int, bool, list)) for value in plain.values())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"extra": 1}, r"unknown \['extra'\]"),
        ({"delta": None}, "bad delta in a certificate"),
        ({"delta": "0.5"}, "bad delta in a certificate"),
        ({"delta": "nan"}, "bad delta in a certificate"),
        ({"delta": "0x1.0p-8 "}, "bad delta in a certificate"),
        ({"bound": "0x1.0p+5000"}, "bad bound in a certificate"),
        ({"step": "141"}, "bad step in a certificate"),
        ({"step": True}, "bad step in a certificate"),
        ({"step": 0}, "bad step in a certificate"),
        ({"horizon": 60.0}, "bad horizon in a certificate"),
        ({"horizon": [1]}, "bad horizon in a certificate"),
        ({"rule": "lion"}, "bad rule in a certificate"),
        ({"betas": ["0x1.0p-1"]}, "bad betas in a certificate"),
        ({"betas": [0.9, 0.999]}, "bad betas in a certificate"),
        ({"amsgrad": 0}, "bad amsgrad in a certificate"),
        ({"decoupled_weight_decay": 1}, "bad decoupled_weight_decay in a certificate"),
        ({"levels_per_octave": 10**6}, "illegal levels_per_octave"),
    ],
)
def test_bad_plain_forms_are_refused(change, text):
    with pytest.raises(FormatError, match=text):
        from_plain({**to_plain(make()), **change})


def test_missing_fields_and_other_types_are_refused():
    plain = to_plain(make())
    del plain["v_max"]
    with pytest.raises(FormatError, match=r"missing \['v_max'\]"):
        from_plain(plain)
    with pytest.raises(FormatError, match="must be a mapping"):
        from_plain([1])


def test_refusals_are_cached_but_fresh():
    def refusal():
        with pytest.raises(Uncertifiable) as caught:
            make(tolerance=1e-6)
        return caught.value

    first, second = refusal(), refusal()
    assert first is not second
    assert (str(first), first.smallest_tolerance) == (str(second), second.smallest_tolerance)


def test_q_is_rounded_up_to_float32():
    for q_max in (0.1, 0.3, c_inf(RULE)):
        stored = make(q_max=q_max).cell.q_max
        assert float(np.nextafter(np.float32(stored), np.float32(0))) < q_max <= stored
