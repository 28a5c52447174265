"""Preparation of torch for the tests of its binding, where it is installed."""

import importlib.util

import pytest


@pytest.fixture(scope="session", autouse=True)
def warm_torch() -> None:
    """Let torch import its compiler now: with the first step of an optimizer it sets an environment variable."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()
