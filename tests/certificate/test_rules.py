"""Coefficients of the float32 implementations against their envelope; limits of q (NOTES 1, 8, 11)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from adam_oracle import run
from hypothesis import given
from hypothesis import strategies as st

from guarddcp.certificate import Adam, Uncertifiable, c_inf, q_limit
from guarddcp.certificate.rounding import ecov
from guarddcp.certificate.rules import envelope, rule_problem, step_constants, tail
from guarddcp.numerics.floats import U, f32, f32_down, f32_up, is_f32

F = np.float32
BETAS = [(0.9, 0.999), (0.9, 0.95), (0.99, 0.9999), (0.1, 0.5), (1e-3, 0.98), (4e-8, 0.9), (0.0, 0.999), (0.99, 0.95)]


def as_python(betas, t):
    """for-loop and foreach on any device, fused on a CPU: coefficients in double, then rounded."""
    b1, b2 = betas
    w, c = f32(1 - b1), f32(1 - b2)
    size, root = f32(1.0 / (1 - b1**t)), f32(math.sqrt(1 - b2**t))
    return 1 - w, w, f32(b2), c, size, root


def as_multiply(betas, t):
    """m * b1 + g * w, the fused CPU kernel of older torch."""
    return f32(betas[0]), *as_python(betas, t)[1:]


def as_double(betas, t):
    """Fused CUDA up to torch 2.10: everything in double, bias corrections rounded."""
    b1, b2 = betas
    return b1, 1 - b1, b2, 1 - b2, f32(1.0 / f32(1 - b1**t)), float(np.sqrt(F(1 - b2**t)))


def as_single(ulps1, ulps2):
    """Fused CUDA from torch 2.11 and the capturable forms: float32 powers, off by so many units in the last place."""

    def coefficients(betas, t):
        b1, b2 = f32(betas[0]), f32(betas[1])
        power1, power2 = F(b1**t), F(b2**t)
        power1 += F(ulps1) * np.spacing(power1)
        power2 += F(ulps2) * np.spacing(power2)
        return b1, 1 - b1, b2, 1 - b2, float(F(1) / (F(1) - power1)), float(np.sqrt(F(1) - power2))

    return coefficients


IMPLEMENTATIONS = [
    as_python,
    as_multiply,
    as_double,
    *itertools.starmap(as_single, itertools.product((-4, 4), repeat=2)),
]


@pytest.mark.parametrize("betas", BETAS)
@pytest.mark.parametrize("step", [1, 2, 17, 1000, 300_000])
@pytest.mark.parametrize("implementation", range(len(IMPLEMENTATIONS)))
def test_the_envelope_covers_every_implementation(betas, step, implementation):
    for j in (1, 2, 10, 100):
        keep_m, w, keep_v, c, size, root = IMPLEMENTATIONS[implementation](betas, step + j)
        rho2 = keep_m**2 / keep_v
        a = keep_m**j / keep_v ** (j / 2) * size * root
        unit = w / math.sqrt(c) * size * root
        b = unit * math.sqrt(math.fsum(rho2**i for i in range(j)))
        a_hi, b_hi, unit_hi = (float(x) for x in envelope(Adam(betas=betas, eps=0.0), step, j))
        assert (a <= a_hi * (1 + 1e-12), b <= b_hi, unit <= unit_hi) == (True, True, True)


@given(st.floats(0.0, 0.999), st.floats(0.01, 0.9999), st.integers(1, 10**6), st.integers(1, 10**5))
def test_the_envelope_is_close(b1, b2, step, j):
    rule = Adam(betas=(b1, b2), eps=0.0)
    if b1 < 1e-3 or not math.isfinite(float(step_constants(rule, step, j)[1])):
        return
    (a, b), (a_hi, b_hi, _) = step_constants(rule, step, j), envelope(rule, step, j)
    spread = 60 * U * (1 / (1 - b1) + 1 / (1 - b2) + 1 / b2 + 1 / b1 + j)
    assert b * (1 - 1e-9) <= b_hi <= b * (1 + spread) + 1e-300
    assert a * (1 - 1e-9) <= a_hi <= a * (1 + spread) + 1e-300


def test_a_factor_could_not_replace_the_envelope():
    """A common factor 1 + ecov on (a_j, b_j) is false for tiny beta1, which float32 1 - b1 can raise by half."""
    rule = Adam(betas=(4e-8, 0.9), eps=0.0)
    implemented = as_python(rule.betas, 11)[0]
    assert implemented / 4e-8 > 1.4 > 1 + ecov(rule, 10)
    assert envelope(rule, 10, 1)[0] / step_constants(rule, 10, 1)[0] > 1.4


@given(st.sampled_from(BETAS[:5]), st.integers(1, 10**5), st.integers(1, 500), st.integers(0, 10**4))
def test_the_tail_point_is_above_all_later_points(betas, step, first, more):
    rule = Adam(betas=betas, eps=0.0)
    a, b, _ = envelope(rule, step, np.unique(np.rint(np.geomspace(first, first + more, 50))))
    for last in (None, first + more):
        a_tail, b_tail = tail(rule, step, first, last)
        assert a.max() <= a_tail * (1 + 1e-12)
        assert b.max() <= b_tail * (1 + 1e-12)


@pytest.mark.parametrize("betas", BETAS[:3])
def test_states_made_by_adam_from_zero_stay_below_q_limit(betas):
    b1, b2 = betas
    n = 3000
    g = (b1 / b2) ** np.arange(n - 1, -1, -1.0)  # the sequence that maximises m / sqrt(v)
    m, v = np.zeros(()), np.zeros(())
    for x in g:
        m, v = b1 * m + (1 - b1) * x, b2 * v + (1 - b2) * x * x
    reached = float(m / np.sqrt(v))
    assert 0.999 * c_inf(Adam(betas=betas, eps=0.0)) < reached < q_limit(Adam(betas=betas, eps=0.0))


def test_limits_of_q_of_known_betas():
    assert c_inf(Adam(betas=(0.9, 0.999), eps=0.0)) == pytest.approx(7.27, abs=0.005)
    assert c_inf(Adam(betas=(0.9, 0.95), eps=0.0)) == pytest.approx(1.165, abs=0.0005)
    unstable = Adam(betas=(0.99, 0.95), eps=0.0)
    assert (c_inf(unstable), q_limit(unstable)) == (math.inf, 64.0)


def test_the_step_counter_of_torch_ends_at_2_24():
    rule = Adam(betas=(0.9, 0.999999), eps=0.0)
    late, later = (step_constants(rule, 2**24, j) for j in (1, 1000))
    assert later[1] > late[1]
    assert step_constants(rule, 2**24 - 5, 100)[1] == step_constants(rule, 2**24, 100)[1]


def test_one_step_by_hand():
    a, b = step_constants(Adam(betas=(0.9, 0.999), eps=0.0), 9, 1)
    m, v, g = 0.3, 1e-2, 0.05
    scale = math.sqrt(0.999 * v + 0.001 * g * g)
    update = run((0.9, 0.999), 0.0, 9, m, v, [g])[0]
    state, gradient = a * m / math.sqrt(v) * math.sqrt(0.999 * v), b * g * math.sqrt(0.001)
    assert update == pytest.approx((state + gradient) / scale, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"betas": (1.0, 0.999)}, "beta1 must be in"),
        ({"betas": (-0.1, 0.999)}, "beta1 must be in"),
        ({"betas": (math.nan, 0.999)}, "beta1 must be in"),
        ({"betas": (0.9, 0.0)}, "beta2 must be in"),
        ({"betas": (0.9, 1.0)}, "beta2 must be in"),
        ({"eps": -1e-8}, "eps must be in"),
        ({"eps": math.inf}, "eps must be in"),
        ({"weight_decay": math.nan}, "weight_decay must be finite"),
    ],
)
def test_illegal_hyperparameters_are_named(change, text):
    assert text in rule_problem(Adam(**{"betas": (0.9, 0.999), "eps": 1e-8, **change}))


def test_betas_next_to_one_are_refused():
    with pytest.raises(Uncertifiable, match="rounds to 0 or 1"):
        envelope(Adam(betas=(0.9, 1 - 1e-9), eps=0.0), 1, 1)
    with pytest.raises(Uncertifiable, match=r"implementations .* differ by"):
        ecov(Adam(betas=(0.9, 1 - 2.05e-7), eps=0.0), 2**24)


@given(st.floats(1e-30, 1e30))
def test_directed_rounding_to_float32(x):
    low, high = f32_down(x), f32_up(x)
    assert is_f32(low)
    assert is_f32(high)
    assert low <= x <= high
    assert high == low if is_f32(x) else high == float(np.nextafter(F(low), F(np.inf)))
    assert f32(x) in (low, high)
