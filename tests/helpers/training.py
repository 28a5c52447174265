"""A small model and its data, for tests in which ranks train like one process that has all their rows."""

import torch

ROWS = 12  # divisible by all sizes


def build() -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double()
    # Ranks are threads that share torch's random state, so the values come from a separate generator.
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)
    return net


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(ROWS, 5, generator=generator, dtype=torch.float64),
        torch.randn(ROWS, 2, generator=generator, dtype=torch.float64),
    )


def shard(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return tensor.chunk(size)[rank]


def loss_of(net: torch.nn.Module, step: int, rank: int = 0, size: int = 1) -> torch.Tensor:
    inputs, targets = rows(step)
    return torch.nn.functional.mse_loss(net(shard(inputs, rank, size)), shard(targets, rank, size))


def values(net: torch.nn.Module) -> torch.Tensor:
    """Return all parameters of `net` in one tensor."""
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
