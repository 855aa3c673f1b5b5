"""Puts the helpers of neighbouring folders (edge values, real optimizer runs) on the path."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("kernels", "certificate")]
