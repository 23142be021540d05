"""Image classification: a small ResNet with batch norm over the whole batch, whatever ranks it is cut over.

    python examples/resnet.py                                 one rank
    torchrun --nproc-per-node 2 examples/resnet.py            two ranks

The images are the 200 patches (100 faces, 100 that are not) that scikit-image ships. Needs scikit-image.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import distpar


class Block(nn.Module):
    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(narrow, wide, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(wide)
        self.second = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(wide)
        self.short = nn.Conv2d(narrow, wide, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.max_pool2d(self.stem(x), 2))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def train_step(model: nn.Module, optimizer: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss


def batch_of(number: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    from skimage.data import lfw_subset

    chosen = torch.randint(200, (batch,), generator=torch.Generator().manual_seed(number))
    images = torch.from_numpy(lfw_subset().copy()).float()[:, None]
    return images[chosen], (chosen < 100).long()


def job(batch: int = 32) -> tuple[Any, tuple[Any, ...]]:
    """The step and its arguments, for `distpar plan` and `distpar bench`."""
    torch.manual_seed(0)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    return train_step, (model, optimizer, *batch_of(0, batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    step, (model, optimizer, *_) = job()
    step = distpar.parallelize(step)
    losses = [float(step(model, optimizer, *batch_of(number, 31)).detach()) for number in range(options.steps)]
    if os.environ.get("RANK", "0") == "0":
        print(step.plan)
        print("losses", " ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
