"""What float32 adds to the bound: spread of coefficients, rounding of each step, underflow (NOTES 8, 9, 10).

All allowances are in units of the learning rate and, unless said otherwise, for one of the two runs. They cover
every torch implementation (for-loop, foreach, fused; CPU and CUDA; with and without FMA; flush-to-zero or not)
while lr is 0 or in [2^-40, 2^30] and |g| <= 2^60. ``q_prime`` is Q + w, the largest |q| of either run.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from guarddcp.certificate.horizon import MAX_FINITE, Horizon
from guarddcp.certificate.rules import (
    Adam,
    Uncertifiable,
    bias_factor,
    coefficients,
    envelope,
    step_constants,
    tail,
)
from guarddcp.numerics.floats import F32_MIN_NORMAL, U, f32_up

__all__ = ["MAX_ECOV", "V_MAX", "ecov", "largest_rounding", "rounding", "rounding_horizon", "underflow", "v_range"]

Array = NDArray[np.float64]

MAX_ECOV = 0.05
"""Coefficients that spread further are refused: first-order reasoning about float32 ends there."""

V_MAX = 2.0**120
"""v above it escapes: with |g| <= 2^60 nothing overflows, at any later step either (v' <= max(v, g^2))."""

EPS_FLOOR = 2.0**-40
"""From this eps on, what underflow takes from v is far below eps^2 and v may be any normal number."""

V_FLOOR_WITHOUT_EPS = 2.0**-97
"""Without such an eps v, and v^ >= v/2, must stay >= 2^-98: a flushed product is then <= U/8 of v."""

MAX_V_MIN = 2.0**-40
"""A v_min above it would make every realistic second moment escape: refused instead."""

SENSIBLE_V_MIN = 2.0**-80
"""Gradients below 1e-12 are rare: a horizon that keeps v_min under it is worth naming."""

FIRST_STEP = 15.0
"""R_1 = 15 U hypot(a Q', b): 3.01 (m) + 1.09 (v) + 10.6 (the rest), times 1.02 (9.4)."""


class _Sums(NamedTuple):
    moment: Array  # sqrt(sum_{i<j} rho^2i ((1+lam) i + 3.01)^2), j = 1..n
    second: Array  # sqrt(sum_{i<j} rho^2i / (1 - i/(j+1))), j = 1..n


class _Terms(NamedTuple):
    """R_j = sum over the three pairs of hypot(first * Q', second); arrays (n,), U included."""

    moment: tuple[Array, Array]
    final: tuple[Array, Array]
    second: tuple[Array, Array]


def ecov(rule: Adam, step: int) -> float:
    """(8.5): how much larger (relative) the constants of a float32 implementation can be than those of D2.

    The larger of b_1 and, for a stable rule, the limit j -> inf. Raises Uncertifiable (``coefficients``) above
    MAX_ECOV. The bound itself uses the envelope, not this number.
    """
    _, b, _ = envelope(rule, step, 1)
    _, b_nominal = step_constants(rule, step, 1)
    spread = float(b / b_nominal) - 1.0
    worst = coefficients(rule)
    if rule.stable and worst.ln_rho < 0.0:
        b1, b2 = rule.betas
        c_nominal = (1.0 - b1) / math.sqrt((1.0 - b2) * (1.0 - b1 * b1 / b2))
        _, c_worst = tail(rule, step, 2**24)
        spread = max(spread, c_worst / c_nominal - 1.0)
    if not spread <= MAX_ECOV:
        raise Uncertifiable(
            f"betas {rule.betas}: float32 implementations of this rule differ by {spread:.2g} (limit {MAX_ECOV}); "
            "beta1 and beta2 must stay further from 1",
            reason="coefficients",
        )
    return spread


def _bucket(k: int) -> int:
    return max(2048, 1 << (k - 1).bit_length())


def _recursive_sum(z: float, x: Array) -> Array:
    """y_j = z y_(j-1) + x_j by doubling windows (all terms are positive, so nothing cancels)."""
    y, width = x.copy(), 1
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        # 1e-30: the part left out is below 1e-30 * 2^17 of what is there.
        while width < len(y) and (factor := float(np.float64(z) ** width)) > 1e-30:
            y[width:] += factor * y[:-width].copy()
            width *= 2
    return y


@lru_cache(maxsize=4)
def _sums(rule: Adam, n: int) -> _Sums:
    b1 = rule.betas[0]
    lam = max(1.0, 2.01 * min(1.0, (1.0 - b1) / b1)) if b1 > 0.0 else 2.01
    ln_rho = coefficients(rule).ln_rho
    age = np.arange(n, dtype=np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        weight = np.exp(2.0 * ln_rho * age) if b1 > 0.0 else (age == 0.0).astype(np.float64)
        moment = np.sqrt(np.cumsum(weight * np.square((1.0 + lam) * age + 3.01)))
        # F_j = sum_{i<j} rho^2i / (j + 1 - i) obeys F_j = rho^2 F_(j-1) + 1 / (j + 1).
        second = np.sqrt((age + 2.0) * _recursive_sum(float(np.exp(2.0 * ln_rho)), 1.0 / (age + 2.0)))
    return _Sums(moment, second)


@lru_cache(maxsize=4)
def _terms(rule: Adam, step: int, n: int) -> _Terms:
    """(9.3) for j = 1..n, with (9.4) at j = 1."""
    b1 = rule.betas[0]
    lam = max(1.0, 2.01 * min(1.0, (1.0 - b1) / b1)) if b1 > 0.0 else 2.01
    sums = _sums(rule, n)
    j = np.arange(1, n + 1, dtype=np.float64)
    a, b, unit = envelope(rule, step, j)
    scale = 1.02 * U
    with np.errstate(over="ignore", invalid="ignore"):
        moment = (scale * (1.0 + lam) * j * a, scale * unit * sums.moment)
        final = (scale * 10.6 * a, scale * 10.6 * b)
        second = (scale * 0.385 * (j + 1.0) ** 1.5 * a, scale * 0.385 * (j + 1.0) * unit * sums.second)
    for pair in (moment, second):
        pair[0][0] = pair[1][0] = 0.0
    final[0][0], final[1][0] = FIRST_STEP * U * a[0], FIRST_STEP * U * b[0]
    return _Terms(moment, final, second)


def _rounding_to(rule: Adam, step: int, n: int, q_prime: float) -> Array:
    terms = _terms(rule, step, _bucket(n))
    with np.errstate(over="ignore"):
        total = sum(np.hypot(state[:n] * q_prime, gradient[:n]) for state, gradient in terms)
    return np.where(np.isnan(total), np.inf, total)


def rounding(rule: Adam, step: int, j: ArrayLike, q_prime: float) -> Array:
    """(9.3), (9.4): R_j, what rounding adds to one run's update of step j; ``j`` integers in 1..2^17, any shape.

    Raises ValueError for j outside that range.
    """
    order = np.asarray(j, dtype=np.int64)
    if order.min() < 1 or order.max() > MAX_FINITE:
        raise ValueError(f"j must be in 1..{MAX_FINITE}, not {order.min()}..{order.max()}")
    return _rounding_to(rule, step, int(order.max()), q_prime)[order - 1]


def largest_rounding(rule: Adam, step: int, k: int, q_prime: float) -> float:
    """max of R_j over 1 <= j <= k, k <= 2^17; infinite where it overflows."""
    return float(rounding(rule, step, np.arange(1, k + 1), q_prime).max())


def rounding_horizon(rule: Adam, step: int, q_prime: float, allowance: float) -> int:
    """(9.5): the largest K in 1..2^17 with 2 max_{j<=K} R_j <= max(2 R_1, ``allowance``)."""
    n = 2048
    while True:
        both = 2.0 * np.maximum.accumulate(_rounding_to(rule, step, n, q_prime))
        inside = int(np.searchsorted(both, max(float(both[0]), allowance), side="right"))
        if inside < n or n == MAX_FINITE:
            return inside
        # R_j grows about linearly in the end, so this guess rarely has to be repeated.
        n = _bucket(min(int(1.02 * n * allowance / float(both[-1])) + 64, MAX_FINITE))


def v_range(rule: Adam, horizon: Horizon) -> tuple[float, float]:
    """(10.1): float32 (v_min, v_max); a coordinate with v outside escapes.

    Raises Uncertifiable (``eps``) if eps < 2^-40 leaves no useful range for the horizon.
    """
    if rule.eps >= EPS_FLOOR:
        return F32_MIN_NORMAL, V_MAX
    remedy = "an eps of at least 2^-40 (9.1e-13)"
    if horizon == "all":
        raise Uncertifiable(
            f"eps = {rule.eps!r} bounds no underflow of v over all later steps; use {remedy} or a finite horizon",
            reason="eps",
            horizon=_horizon_of_eps(rule),
        )
    log2_v_min = math.log2(V_FLOOR_WITHOUT_EPS) - horizon * math.log2(rule.betas[1])
    if not log2_v_min <= math.log2(MAX_V_MIN):
        raise Uncertifiable(
            f"eps = {rule.eps!r} with horizon {horizon} would need v >= 2^{log2_v_min:.0f}; "
            f"use {remedy} or a shorter horizon",
            reason="eps",
            horizon=_horizon_of_eps(rule),
        )
    return f32_up(2.0**log2_v_min * (1.0 + 1e-12)), V_MAX


def _horizon_of_eps(rule: Adam) -> int:
    """The longest horizon with which eps < 2^-40 makes next to nothing escape, at least 1."""
    octaves = math.log2(SENSIBLE_V_MIN / V_FLOOR_WITHOUT_EPS)
    return int(max(1.0, min(MAX_FINITE, math.floor(octaves / -math.log2(rule.betas[1])))))


def underflow(rule: Adam, step: int, q_prime: float, a: Array, b: Array, largest: float) -> float:
    """(10.2), (10.3): what gradual underflow or flush-to-zero adds to the difference (both runs).

    ``a``, ``b``: hull points; ``largest``: max of R_j up to the horizon, used if eps < 2^-40.
    """
    worst = coefficients(rule)
    if rule.eps < EPS_FLOOR:
        return 2.0 * (0.07 * largest + 2.0**-35)
    lost = math.sqrt(2.0**-124 / worst.c_lo)  # in sqrt(v), after any number of steps
    reach = float(np.hypot(a * q_prime, b).max())
    first_moment = 2.0**-124 * bias_factor(rule, step) / ((1.0 - worst.b1_hi) * rule.eps)
    return 2.0 * (1.01 * reach * lost / (4.0 * rule.eps) + first_moment + 2.0**-86 / rule.eps)
