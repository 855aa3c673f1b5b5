"""The optimizer rule that a certificate speaks of, and its constants for the steps after a save.

"Step j" is the j-th update after the save. Everything is in units of that step's learning rate. Equation
numbers are those of NOTES.md beside this file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from guarddcp.numerics.floats import U, f32

__all__ = [
    "MAX_STEP",
    "Adam",
    "Coefficients",
    "Uncertifiable",
    "bias_factor",
    "c_inf",
    "coefficients",
    "envelope",
    "q_limit",
    "rule_problem",
    "step_constants",
    "tail",
]

Array = NDArray[np.float64]

MAX_STEP = 2**24
"""Torch keeps ``step`` in float32, where adding 1 stops having an effect at 2^24."""

Q_WITHOUT_LIMIT = 64.0
"""q_limit of a rule with b1^2 >= b2, whose |q| has no useful limit: larger ratios escape, nothing breaks."""

POWF_ERROR = 8.0
"""Relative error of a float32 power in units of U: 4 units in the last place, twice what CUDA documents."""

TINY_BETA = 2.0**-60
"""Below it b^T is nothing beside U, whatever float32 makes of b."""

LR_ERROR = 6.0
"""Units of U for float32(lr), lr / bc1, the square root of bc2, its reciprocal and products of those."""


class Uncertifiable(ValueError):
    """No certificate of the wanted kind exists; the pair has to be stored exactly.

    ``reason`` is a short slug: ``amsgrad``, ``step``, ``hyperparameters``, ``coefficients``, ``horizon``,
    ``eps`` or ``tolerance``. The message names what would do; ``smallest_tolerance`` and ``horizon`` hold
    it as a number where it is one.
    """

    def __init__(
        self, message: str, *, reason: str, smallest_tolerance: float | None = None, horizon: int | None = None
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.smallest_tolerance = smallest_tolerance
        self.horizon = horizon


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam or AdamW as a param group states it. The learning rate is the unit, so it is not part of the rule.

    ``betas``: (b1, b2), 0 <= b1 < 1, 0 < b2 < 1. ``eps``: 0 <= eps <= 2^60. ``decoupled_weight_decay``: None
    if the group does not say (torch before the key existed). Nothing is checked here: ``certify`` refuses
    illegal values as Uncertifiable, ``prove`` as FormatError.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float = 0.0
    decoupled_weight_decay: bool | None = True
    amsgrad: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        b1, b2 = self.betas
        object.__setattr__(self, "betas", (float(b1), float(b2)))
        object.__setattr__(self, "eps", float(self.eps))
        object.__setattr__(self, "weight_decay", float(self.weight_decay))

    @property
    def first_step_only(self) -> bool:
        """Whether weight decay enters the gradient (or may): then later gradients are not common to both runs."""
        return self.weight_decay != 0.0 and self.decoupled_weight_decay is not True

    @property
    def stable(self) -> bool:
        """Whether b1^2 < b2, without which no scale-free bound covers all later steps (NOTES 7)."""
        return self.betas[0] ** 2 < self.betas[1]


def rule_problem(rule: Adam) -> str | None:
    """What is illegal about the hyperparameters, in words with the value; None if nothing is."""
    b1, b2 = rule.betas
    if not 0.0 <= b1 < 1.0:
        return f"beta1 must be in [0, 1), not {b1!r}"
    if not 0.0 < b2 < 1.0:
        return f"beta2 must be in (0, 1), not {b2!r}"
    if not 0.0 <= rule.eps <= 2.0**60:
        return f"eps must be in [0, 2^60], not {rule.eps!r}"
    if not math.isfinite(rule.weight_decay):
        return f"weight_decay must be finite, not {rule.weight_decay!r}"
    return None


class Coefficients(NamedTuple):
    """Worst float32 coefficients over all implementations (NOTES 8); floats, no unit.

    ``b1_hi``: largest weight that any implementation gives to m; ``b2_lo``: smallest weight given to v;
    ``w_hi``, ``c_lo``: largest weight given to g, smallest given to g^2; ``ln_rho``: ln(b1_hi / sqrt(b2_lo)).
    """

    b1_hi: float
    b2_lo: float
    w_hi: float
    c_lo: float
    ln_rho: float


def _ln_rho(b1: float, b2: float) -> float:
    return (math.log(b1) if b1 > 0.0 else -math.inf) - 0.5 * math.log(b2)


@lru_cache(maxsize=64)
def coefficients(rule: Adam) -> Coefficients:
    """(8.1): the values that b1, b2, 1 - b1 and 1 - b2 take in float32, taken at their worst.

    Raises Uncertifiable (``coefficients``) if beta2 rounds to 0 or 1 somewhere.
    """
    b1, b2 = rule.betas
    b1_hi = max(b1, f32(b1), 1.0 - f32(1.0 - b1))
    w_hi = max(1.0 - b1, f32(1.0 - b1), 1.0 - f32(b1))
    b2_lo = min(b2, f32(b2), 1.0 - f32(1.0 - b2))
    c_lo = min(1.0 - b2, f32(1.0 - b2), 1.0 - f32(b2))
    if b2_lo <= 0.0 or c_lo <= 0.0:
        raise Uncertifiable(
            f"beta2 = {b2!r} rounds to 0 or 1 in float32, so the update has no meaning there; "
            f"beta2 must lie between 1e-6 and 1 - 2e-6",
            reason="coefficients",
        )
    return Coefficients(b1_hi, b2_lo, w_hi, c_lo, _ln_rho(b1_hi, b2_lo))


def _steps(step: int, j: ArrayLike) -> Array:
    return np.minimum(np.asarray(j, dtype=np.float64) + step, float(MAX_STEP))


def _bias(b: float, steps: Array) -> tuple[Array, Array]:
    """(1 - b^T, b^T) without cancellation."""
    with np.errstate(divide="ignore", under="ignore"):
        exponent = steps * np.log(np.float64(b))
        return -np.expm1(exponent), np.exp(exponent)


def _bias_error(b: float, power: Array, bias: Array, steps: Array) -> Array:
    """(8.2): relative error of a float32 1 - b^T, whatever way it is computed."""
    if b < TINY_BETA:
        return np.full_like(bias, 1.01 * U)
    base = abs(math.log(f32(b) / b))
    return 1.01 * (U + (np.expm1(steps * base) + POWF_ERROR * U) * power / bias)


def _geometric(ln_rho: float, j: Array) -> Array:
    """sum of rho^(2i) over 0 <= i < j; overflows to infinity."""
    if ln_rho == 0.0:
        return j.copy()
    with np.errstate(over="ignore", under="ignore"):
        return np.expm1(2.0 * ln_rho * j) / math.expm1(2.0 * ln_rho)


def step_constants(rule: Adam, step: int, j: ArrayLike) -> tuple[Array, Array]:
    """(D2): the constants (a_j, b_j) of the update j steps after ``step``, from the betas as real numbers.

    ``j``: integers >= 1, any shape; returns two float64 arrays of that shape (at least 0-d).
    """
    b1, b2 = rule.betas
    order = np.asarray(j, dtype=np.float64)
    steps = _steps(step, order)
    bias1, _ = _bias(b1, steps)
    bias2, _ = _bias(b2, steps)
    beta = np.sqrt(bias2) / bias1
    ln_rho = _ln_rho(b1, b2)
    with np.errstate(over="ignore", under="ignore"):
        a = np.exp(ln_rho * order) * beta
    return a, beta * ((1.0 - b1) / math.sqrt(1.0 - b2)) * np.sqrt(_geometric(ln_rho, order))


def _beta_hi(rule: Adam, steps: Array) -> tuple[Array, Array]:
    """Upper bounds of sqrt(bc2)/bc1 and of 1/bc1 over all implementations (8.3)."""
    bias1, power1 = _bias(rule.betas[0], steps)
    bias2, power2 = _bias(rule.betas[1], steps)
    error1 = _bias_error(rule.betas[0], power1, bias1, steps)
    error2 = _bias_error(rule.betas[1], power2, bias2, steps)
    if not (np.all(error1 < 0.05) and np.all(error2 < 0.05)):
        raise Uncertifiable(
            f"betas {rule.betas} are too close to 1 for float32 bias corrections at this step: implementations "
            "differ by more than 5 %; beta1 and beta2 must stay below 1 - 2e-6",
            reason="coefficients",
        )
    over = (1.0 + LR_ERROR * U) / (bias1 * (1.0 - error1))
    return np.sqrt(bias2 * (1.0 + error2)) * over, np.sqrt(1.0 + error2) * over


def envelope(rule: Adam, step: int, j: ArrayLike) -> tuple[Array, Array, Array]:
    """(8.4): (a_j, b_j, b'_j) with every float32 implementation below them; b'_j = beta (1-b1)/sqrt(1-b2).

    Shapes as in ``step_constants``. Raises Uncertifiable (``coefficients``) if implementations lie too far apart.
    """
    worst = coefficients(rule)
    order = np.asarray(j, dtype=np.float64)
    beta, _ = _beta_hi(rule, _steps(step, order))
    with np.errstate(over="ignore", under="ignore"):
        a = np.exp(worst.ln_rho * order) * beta
    unit = beta * (worst.w_hi / math.sqrt(worst.c_lo))
    return a, unit * np.sqrt(_geometric(worst.ln_rho, order)), unit


def tail(rule: Adam, step: int, first: int, last: int | None = None) -> tuple[float, float]:
    """(6.2): one point above all envelope points with ``first`` <= j <= ``last`` (None: no end).

    Needs a rule that is stable in float32 too.
    """
    worst = coefficients(rule)
    _, over = _beta_hi(rule, _steps(step, float(first)))
    if last is None:
        root2, sums = 1.0, -1.0 / math.expm1(2.0 * worst.ln_rho)
    else:
        beta_last, over_last = _beta_hi(rule, _steps(step, float(last)))
        root2 = float(beta_last / over_last)
        sums = float(_geometric(worst.ln_rho, np.asarray(float(last))))
    a = math.exp(worst.ln_rho * first) * float(over)
    return a, worst.w_hi / math.sqrt(worst.c_lo) * math.sqrt(sums) * root2 * float(over)


def bias_factor(rule: Adam, step: int) -> float:
    """Largest 1/bc1 of any step after ``step``, over all implementations (8.3)."""
    _, over = _beta_hi(rule, _steps(step, 1.0))
    return float(over)


def c_inf(rule: Adam) -> float:
    """(D2): sup of |m| / sqrt(v) over states that Adam makes from zero; infinite if b1^2 >= b2."""
    b1, b2 = rule.betas
    if not rule.stable:
        return math.inf
    return (1.0 - b1) / math.sqrt((1.0 - b2) * -math.expm1(2.0 * _ln_rho(b1, b2)))


def q_limit(rule: Adam) -> float:
    """(11.3): the largest useful Q: no state made by Adam from zero escapes it; 64 if there is no such limit."""
    limit = c_inf(rule) * (1.0 + 1e-4)
    return limit if math.isfinite(limit) else Q_WITHOUT_LIMIT
