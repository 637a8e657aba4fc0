"""Torch on one thread: the tests' networks are too small for more."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("torch"):
    import torch

    torch.set_num_threads(1)
