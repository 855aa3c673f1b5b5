"""Plain float64 Adam and worst-case sequences, written from the definition of the update and nothing else."""

from __future__ import annotations

import math

import numpy as np


def run(betas, eps, step, m, v, gradients):
    """Updates U_1..U_k (units of lr) of Adam from (m, v) saved at ``step``; gradients (k, n) or (k,)."""
    b1, b2 = betas
    updates = []
    for age, g in enumerate(gradients, 1):
        t = step + age
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        bc1, bc2 = -math.expm1(t * math.log(b1)) if b1 else 1.0, -math.expm1(t * math.log(b2))
        updates.append((m / bc1) / (np.sqrt(v / bc2) + eps))
    return np.array(updates)


def one_line(w, h, q_max, a, b, x, log2_r2, e):
    """The one-line form at gradient x, v^/v = 2^log2_r2 in [2^-h, 2^h] and relative eps e."""
    assert np.all(np.abs(log2_r2) <= h)
    r = 2.0 ** (log2_r2 / 2)
    native, restored = np.hypot(1, x) + e, np.hypot(r, x) + e
    return a * w / native + a * q_max * np.abs(1 / native - r / restored) + b * x * np.abs(1 / native - 1 / restored)


def constants(betas, step, j):
    """(a_j, b_j) summed term by term."""
    b1, b2 = betas
    rho = b1 / math.sqrt(b2)
    beta = math.sqrt(1 - b2 ** (step + j)) / (1 - b1 ** (step + j))
    total = math.fsum(rho ** (2 * i) for i in range(j))
    return rho**j * beta, (1 - b1) / math.sqrt(1 - b2) * math.sqrt(total) * beta


def worst_gradients(betas, j, x):
    """j gradients for v = 1 that reach |M| = c_j sqrt(V) with V = x^2 b2^j v: g_i ~ (b1/b2)^age, all negative."""
    b1, b2 = betas
    age = np.arange(j - 1, -1, -1, dtype=np.float64)
    shape = (b1 / b2) ** age
    mass = (1 - b2) * math.fsum(b2**age * shape**2)
    return -shape * x * math.sqrt(b2**j / mass)


def attained(betas, step, j, w, h, q_max, x):
    """|D_j| of real Adam runs from the worst corner (v^ too small, q above q^ = Q) under the worst gradients."""
    g = worst_gradients(betas, j, x)
    v_low = 2.0**-h
    native = run(betas, 0.0, step, q_max + w, 1.0, g)[-1]
    restored = run(betas, 0.0, step, q_max * math.sqrt(v_low), v_low, g)[-1]
    return abs(native - restored)


def worst_x(w, h, q_max, a, b):
    """The gradient x at which the one-line form is largest (grid in the angle, r at the small corner)."""
    x = np.tan(np.linspace(0, math.pi / 2, 4001)[:-1])
    return float(x[np.argmax(one_line(w, h, q_max, a, b, x, -h, 0.0))])
