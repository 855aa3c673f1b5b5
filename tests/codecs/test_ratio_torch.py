"""Real torch.optim runs from original and from decoded moments, on common gradients: the certified bound holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch_steps
from moments import round_trip
from torch_steps import KINDS

from guarddcp.certificate import Adam, c_inf, certify

N = 3001  # odd: vectorised optimizers treat a tail differently


def states(cert, rng):
    """float32 (N,): v over many decades at and between the edges of cells, q at and between the edges of codes."""
    cell = cert.cell
    most = np.floor(cell.q_max * (1 - 2.0**-22) / cell.delta)
    half = rng.choice([-0.5, 0.5], N) * np.where(rng.random(N) < 0.7, 1.0, rng.random(N))
    level = rng.integers(-60, 30, N) * cell.levels_per_octave + rng.integers(-20, 20, N)
    v = 2.0 ** ((level + half * (1 - 1e-4)) / cell.levels_per_octave)
    code = np.where(rng.random(N) < 0.4, most * rng.choice([-1, 1], N), rng.integers(-most, most + 1, N))
    q = (code + rng.choice([-0.5, 0.0, 0.5], N) * (1 - 1e-4)) * cell.delta
    order = np.argsort(v)
    return (q * np.sqrt(v)).astype(np.float32)[order], v.astype(np.float32)[order]


@pytest.mark.parametrize("steps", [1, 50])
@pytest.mark.parametrize(("betas", "step", "tolerance", "decoupled"), [
    ((0.9, 0.999), 1000, 0.01, True), ((0.9, 0.999), 1, 0.1, True), ((0.9, 0.95), 300, 0.01, True),
    ((0.0, 0.99), 7, 0.05, True), ((0.9, 0.999), 141, 1e-3, True), ((0.9, 0.999), 1000, 0.01, False),
])  # fmt: skip
def test_updates_from_decoded_moments_stay_within_the_bound(betas, step, tolerance, decoupled, steps):
    rule = Adam(betas=betas, eps=1e-8, weight_decay=0.1 if decoupled else 0.0, decoupled_weight_decay=decoupled)
    horizon = "all" if steps > 1 else 1
    q_max = min(3.0, c_inf(rule))
    cert = certify(rule, step, tolerance=tolerance, horizon=horizon, rounding_share=0.05, q_max=q_max)
    rng = np.random.default_rng([step, steps])
    m, v = states(cert, rng)
    # Many short rows, so that prediction is good and next to nothing escapes.
    m_hat, v_hat, coded = (x.reshape(-1) if isinstance(x, np.ndarray) else x for x in round_trip(m, v, cert, 60))
    assert coded.escapes.sum() <= N // 10
    g = torch_steps.gradients(rule, m, v, rng, steps)
    largest = 0.0
    for kind in KINDS:
        native, restored = (torch_steps.run(rule, kind, step, *state, g) for state in ((m, v), (m_hat, v_hat)))
        largest = max(largest, float(np.abs(native - restored).max()))
    assert largest <= cert.bound <= tolerance
    # The attack comes near: these states lie at the edges of their cells.
    assert largest >= 0.55 * cert.bound
