"""Real torch.optim runs from given moments, and states and gradients that try to break a cell.

Parameters are set back before every step to values so small that adding the update to them rounds nothing away:
the difference of parameters is then the update itself.
"""

from __future__ import annotations

import math

import numpy as np
import torch

LR = 1e-3
KINDS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def run(rule, kind, step, m, v, gradients, p=None):
    """Updates (k, n) in units of LR, float64, of Adam or AdamW in float32 from moments (n,) saved at ``step``."""
    start = torch.zeros(m.shape) if p is None else torch.from_numpy(p)
    parameter = torch.nn.Parameter(start.clone())
    options = dict(lr=LR, betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay, maximize=rule.maximize)
    make = torch.optim.AdamW if rule.decoupled_weight_decay else torch.optim.Adam
    optimizer = make([parameter], **options, **KINDS[kind])
    optimizer.state[parameter] = {
        "step": torch.tensor(float(step)),
        "exp_avg": torch.from_numpy(m.copy()),
        "exp_avg_sq": torch.from_numpy(v.copy()),
    }
    updates = np.empty(gradients.shape)
    decay = 1 - LR * rule.weight_decay if rule.decoupled_weight_decay else 1.0
    for j, g in enumerate(gradients):
        with torch.no_grad():
            parameter.copy_(start)
        parameter.grad = torch.from_numpy(g.copy())
        optimizer.step()
        updates[j] = (decay * start.double() - parameter.detach().double()).numpy() / LR
    return updates


def actual(rule, step, m, v, gradients):
    """The same in float64 with the float32 coefficients that torch's CPU kernels use, one rounding nowhere."""
    b1, b2 = rule.betas
    f = lambda x: float(np.float32(x))  # noqa: E731
    w, c, keep = f(1 - b1), f(1 - b2), f(b2)
    m, v, updates = m.astype(np.float64), v.astype(np.float64), []
    for j, g in enumerate(gradients.astype(np.float64) * (-1 if rule.maximize else 1), 1):
        m, v = (1 - w) * m + w * g, keep * v + c * g * g
        root, size = f(math.sqrt(1 - b2 ** (step + j))), f(LR / (1 - b1 ** (step + j)))
        updates.append(size * m / (np.sqrt(v) / root + f(rule.eps)) / LR)
    return np.array(updates)


def corners(cell, v_min, v_max, rng, n):
    """(m, v, m^, v^), float32 (n,): pairs at or near corners of ``cell``, v over all decades of its range."""
    v = 2.0 ** rng.uniform(math.log2(v_min), math.log2(v_max), n)
    v[: n // 8] = v_min
    edge = lambda shrink: np.where(rng.random(n) < 0.7, rng.choice([-1, 1], n), rng.uniform(-1, 1, n)) * shrink  # noqa: E731
    # Rounding the four numbers to float32 moves log2(v/v^) by up to 1.8e-7 and q by up to 3 units of 2^-24.
    v_restored = v * 2.0 ** edge(max(cell.h - 3e-7, 0.0))
    q_restored = edge(cell.q_max * (1 - 2e-7))
    q = q_restored + edge(cell.w - 4 * 2.0**-24 * cell.q_prime)
    states = q * np.sqrt(v), v, q_restored * np.sqrt(v_restored), v_restored
    return tuple(x.astype(np.float32) for x in states)


def gradients(rule, m, v, rng, k):
    """float32 (k, n): each coordinate gets one of eight kinds of sequence, over 14 decades around its own scale."""
    n = len(m)
    b1, b2 = rule.betas
    scale = np.sqrt(v.astype(np.float64))
    j = np.arange(k)[:, None]
    target = rng.integers(1, k + 1, n)
    size = 10.0 ** rng.uniform(-1.0, 1.0, n)
    decades = 10.0 ** rng.uniform(-7, 7, (k, n))
    normal = rng.standard_normal((k, n))
    age = target[None, :] - 1 - j
    extremal = -np.sign(m + 1e-300) * size * np.where(age >= 0, (b1 / b2) ** np.maximum(age, 0), 0.0)
    kinds = np.stack(
        [
            extremal,
            -extremal,
            normal * decades,
            np.zeros((k, n)),
            normal * 10.0 ** rng.uniform(-7, 7, n),
            np.where(j == target - 1, size, 1e-6 * normal),
            normal * 1.5 ** (j - k / 2),
            np.where(j == 0, -m / scale * b1 / (1 - b1) * (1 + 1e-7 * normal), 0.1 * normal),
        ]
    )
    chosen = kinds[rng.integers(0, len(kinds), n), :, np.arange(n)].T * scale
    return np.clip(chosen, -(2.0**60), 2.0**60).astype(np.float32)
