"""Which step constants matter for a horizon: the upper right convex hull of all (a_j, b_j) (NOTES 6)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from guarddcp.certificate.rules import Adam, Uncertifiable, coefficients, envelope, tail

__all__ = ["MAX_FINITE", "Horizon", "hull"]

Array = NDArray[np.float64]
Horizon = int | Literal["all"]

MAX_FINITE = 2**17
"""Longest finite horizon: the allowance for rounding (NOTES 9) is derived for so many steps."""

MAX_LISTED = 20000
"""At most so many steps are listed before the tail point; fewer only make the bound looser."""

SETTLED = math.log(1e-4)
"""Listing ends when rho^j and b1^T are below 1e-4: the tail point is then 1e-4 loose at most."""


def _num_listed(rule: Adam, step: int) -> int:
    b1 = rule.betas[0]
    ln_rho = coefficients(rule).ln_rho
    if b1 == 0.0:
        return 1
    wanted = max(SETTLED / ln_rho, SETTLED / math.log(b1) - step) if ln_rho < 0.0 else math.inf
    return max(1, math.ceil(min(wanted, MAX_LISTED)))


@lru_cache(maxsize=256)
def hull(rule: Adam, step: int, horizon: Horizon) -> tuple[Array, Array]:
    """(6.1), (6.2): hull points (a, b), each (P,), read-only, that dominate steps 1..horizon after ``step``.

    A bound that is linear and nondecreasing in (a, b) is largest at one of them. Constants are the envelope
    over float32 implementations. Raises Uncertifiable (``horizon``) for "all" if b1^2 >= b2 in float32.
    """
    stable = coefficients(rule).ln_rho < 0.0
    if horizon == "all" and not stable:
        raise Uncertifiable(f"no bound covers all later steps: betas {rule.betas} have b1^2 >= b2", reason="horizon")
    listed = _num_listed(rule, step)
    with_tail = horizon == "all" or (stable and horizon > listed)
    if not with_tail:
        assert horizon != "all"
        listed = horizon
    a, b, _ = envelope(rule, step, np.arange(1, listed + 1))
    if with_tail:
        a_tail, b_tail = tail(rule, step, listed + 1, None if horizon == "all" else horizon)
        a, b = np.append(a, a_tail), np.append(b, b_tail)
    a, b = _upper_right(a, b)
    a.flags.writeable = b.flags.writeable = False
    return a, b


def _upper_right(a: Array, b: Array) -> tuple[Array, Array]:
    """Extreme points of the set dominated by the points (a, b), a falling and b rising."""
    order = np.lexsort((-b, -a))
    a, b = a[order], b[order]
    rising = np.append(True, b[1:] > np.maximum.accumulate(b)[:-1])
    a, b = a[rising], b[rising]
    for _ in range(8):
        # A point on or under the chord of its neighbours is no extreme point, so all such may go at once.
        cross = (a[:-2] - a[1:-1]) * (b[2:] - b[1:-1]) - (a[1:-1] - a[2:]) * (b[1:-1] - b[:-2])
        keep = np.concatenate(([True], cross < 0.0, [True]))[: len(a)]
        if keep.all():
            return a.copy(), b.copy()
        a, b = a[keep], b[keep]
    return _chain(a.tolist(), b.tolist())


def _chain(a: list[float], b: list[float]) -> tuple[Array, Array]:
    """The same by one pass that steps back (monotone chain): linear where peeling layers would not be."""
    kept: list[int] = []
    for i in range(len(a)):
        while len(kept) > 1:
            k, m = kept[-2], kept[-1]
            if (a[k] - a[m]) * (b[i] - b[m]) < (a[m] - a[i]) * (b[m] - b[k]):
                break
            kept.pop()
        kept.append(i)
    return np.array([a[i] for i in kept]), np.array([b[i] for i in kept])
