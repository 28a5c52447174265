"""ResNet-50 as in the paper and in torchvision, for machines without torchvision."""

import torch
from torch import nn

WIDTHS = (64, 128, 256, 512)
BLOCKS = (3, 4, 6, 3)
WIDER = 4  # output channels of a block, in multiples of its width


class Bottleneck(nn.Module):
    """Block of three convolutions and a shortcut; the middle one shrinks the picture by `stride`."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = WIDER * width
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return the block's output for `pictures` [rows, channels, height, width]."""
        return torch.relu(self.body(pictures) + self.shortcut(pictures))


def resnet50(classes: int = 1000) -> nn.Module:
    """Return the network for `pictures` [rows, 3, height, width]: 25 557 032 parameters with 1000 classes."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    ]  # fmt: skip
    channels = 64
    for stage, (width, blocks) in enumerate(zip(WIDTHS, BLOCKS, strict=True)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if block == 0 and stage > 0 else 1))
            channels = WIDER * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
