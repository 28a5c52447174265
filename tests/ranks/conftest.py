"""What holds for the tests of the torch binding."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def warm_torch() -> None:
    """Let torch import its compiler now: with the first step of an optimizer it sets an environment variable."""
    torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()
