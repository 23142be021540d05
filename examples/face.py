"""Face recognition with many identities: a small CNN and an ArcFace head, written for one device.

    python examples/face.py                                   one rank
    torchrun --nproc-per-node 4 examples/face.py              four ranks
    distpar plan examples/face.py:job --ranks 4               only the plan

The photographs are the 100 faces that scikit-image ships, one identity each; all further identities have no
photograph and act as negatives. Needs scikit-image.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import distpar


def faces() -> torch.Tensor:
    """100 photographs of 25 x 25, in -1..1."""
    from skimage.data import lfw_subset

    return torch.from_numpy(lfw_subset()[:100].copy()).float()[:, None] * 2 - 1


def augment(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Shift by up to 2 pixels, flip, change contrast, add noise."""
    count = len(images)
    shifts = torch.randint(-2, 3, (count, 2), generator=generator)
    moved = torch.stack(
        [torch.roll(image, tuple(shift.tolist()), (1, 2)) for image, shift in zip(images, shifts, strict=True)]
    )
    flip = torch.rand(count, 1, 1, 1, generator=generator) < 0.5
    moved = torch.where(flip, moved.flip(-1), moved)
    contrast = 0.7 + 0.6 * torch.rand(count, 1, 1, 1, generator=generator)
    return moved * contrast + 0.1 * torch.randn(moved.shape, generator=generator)


class FaceModel(nn.Module):
    """CNN with batch norm -> embedding -> cosine to every class centre, with an angular margin at the target."""

    def __init__(self, identities: int, width: int = 128) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, 1, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64 * 6 * 6, width),
        )  # fmt: skip
        self.centres = nn.Parameter(0.01 * torch.randn(identities, width))

    def cosine(self, images: torch.Tensor) -> torch.Tensor:
        return F.linear(F.normalize(self.body(images)), F.normalize(self.centres))

    def forward(self, images: torch.Tensor, identities: torch.Tensor) -> torch.Tensor:
        cosine = self.cosine(images).clamp(-0.9999, 0.9999)
        hit = torch.arange(len(self.centres)) == identities[:, None]
        sine = torch.sqrt(1 - cosine * cosine)
        margin = cosine * 0.9553 - sine * 0.2955  # cos(angle + 0.3)
        return 32.0 * torch.where(hit, margin, cosine)


def train_step(model: nn.Module, optimizer: Any, images: torch.Tensor, identities: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images, identities), identities)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss


def job(identities: int = 50_000, batch: int = 256) -> tuple[Any, tuple[Any, ...]]:
    """The step and its arguments, for `distpar plan` and `distpar bench`."""
    torch.manual_seed(0)
    model = FaceModel(identities)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return train_step, (model, optimizer, *batch_of(0, batch))


def batch_of(number: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    chosen = torch.randint(100, (batch,), generator=generator)
    return augment(faces()[chosen], generator), chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--identities", type=int, default=50_000)
    options = parser.parse_args()
    step, (model, optimizer, *_) = job(options.identities)
    step = distpar.parallelize(step)
    losses = [float(step(model, optimizer, *batch_of(number, 256)).detach()) for number in range(options.steps)]
    if os.environ.get("RANK", "0") == "0":
        print(step.plan)
        print("losses", " ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
