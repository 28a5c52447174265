"""Seeds of the random generators that a PyTorch program may use."""

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed the random generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
