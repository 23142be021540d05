"""A small residual network with batch norm on photographs with and without a face, written for one device.

    python examples/resnet.py
    torchrun --nproc-per-node 4 examples/resnet.py
"""

from __future__ import annotations

import argparse
import os

import numpy as np
import torch
import torch.nn.functional as F
from skimage.data import lfw_subset
from torch import nn

import distpar


class Block(nn.Module):
    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(narrow, wide, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(wide)
        self.second = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(wide)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or narrow != wide:
            self.short = nn.Sequential(nn.Conv2d(narrow, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, classes: int = 2, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        return self.head(F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def batch(number: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Random photographs: the first 100 of the set are faces, the others are not."""
    photographs = torch.from_numpy(np.ascontiguousarray(lfw_subset())).float()[:, None]
    chosen = torch.randint(len(photographs), (size,), generator=torch.Generator().manual_seed(number))
    return photographs[chosen], (chosen < 100).long()


def job():
    """(step, args) for `distpar plan examples/resnet.py:job`."""
    torch.manual_seed(0)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return train_step, (model, optimizer, *batch(0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    step, (model, optimizer, *_) = job()
    step = distpar.parallelize(step)
    losses = [float(step(model, optimizer, *batch(number))) for number in range(options.steps)]
    if os.environ.get("RANK", "0") == "0":
        print("losses", " ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
