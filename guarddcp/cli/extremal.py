"""How tight a certificate is: the worst state of its cell under the worst gradients, in float64.

Gradients g_i ~ (b1/b2)^age attain Cauchy-Schwarz (certificate/NOTES.md 3); the worst corner of the cell is v^ too small
by h with q^ = Q and q = Q + w. What Adam then does differently in the two runs is compared with the exact part of the
bound.
"""

from __future__ import annotations

import math

import numpy as np

from guarddcp.certificate import Certificate
from guarddcp.certificate.bound import bound
from guarddcp.certificate.horizon import hull
from guarddcp.certificate.rules import Adam

__all__ = ["bound_over_attained"]

_ANGLES = 2001
_LONGEST = 2000
"""Steps simulated for horizon "all"; the tail beyond differs by b1^2000."""


def bound_over_attained(certificate: Certificate) -> float:
    """Certified bound, rounding aside, over the largest deviation that the sequences above reach (1 is tight)."""
    cell, rule, step = certificate.cell, certificate.rule, certificate.step
    a, b = hull(rule, step, certificate.horizon)
    certified = float(bound(cell.w, cell.kap, cell.q_max, a, b).max())
    longest = _LONGEST if certificate.horizon == "all" else int(certificate.horizon)
    steps = sorted(
        {1, 2, 3, longest, *np.unique(np.geomspace(1, longest, 40).astype(int)).tolist()} & set(range(1, longest + 1))
    )
    reached = max(_attained(rule, step, j, cell.w, cell.h, cell.q_max) for j in steps)
    return certified / reached


def _attained(rule: Adam, step: int, j: int, w: float, h: float, q_max: float) -> float:
    """Largest |D_j| over the size of the gradients, from v = 1 and v^ = 2^-h."""
    b1, b2 = rule.betas
    x = np.tan(np.linspace(0.0, math.pi / 2, _ANGLES)[:-1])
    age = np.arange(j - 1, -1, -1, dtype=np.float64)
    shape = (b1 / b2) ** age
    mass = (1.0 - b2) * math.fsum(b2**age * shape**2)
    unit = -shape * math.sqrt(b2**j / mass)
    drift_m = (1.0 - b1) * math.fsum(b1**age * unit)
    drift_v = (1.0 - b2) * math.fsum(b2**age * unit**2)
    t = step + j
    factor = math.sqrt(1.0 - b2**t) / (1.0 - b1**t)

    def update(q: float, v: float) -> np.ndarray:
        m = b1**j * q * math.sqrt(v) + drift_m * x
        return factor * m / np.sqrt(b2**j * v + drift_v * x * x)

    low = 2.0**-h
    restored = update(q_max, low)
    native = (b1**j * (q_max + w) + drift_m * x) * factor / np.sqrt(b2**j + drift_v * x * x)
    return float(np.abs(native - restored).max())
