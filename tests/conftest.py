"""Settings of the whole suite."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

# Ranks are forked from the test process. A fork copies no threads, so the parent must never start OpenMP's.
torch.set_num_threads(1)

# Machines of CI are shared: a slow example is no failure. ci is repeatable and looks longer.
settings.register_profile("dev", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
