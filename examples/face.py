"""Face recognition over many identities: a small CNN and a head with an angular margin, written for one device.

    python examples/face.py
    torchrun --nproc-per-node 4 examples/face.py --identities 50000
"""

from __future__ import annotations

import argparse
import math
import os

import numpy as np
import torch
import torch.nn.functional as F
from skimage.data import lfw_subset
from torch import nn

import distpar


class FaceNet(nn.Module):
    """A CNN that embeds a face, and a centre for each identity; gives the cosine to every centre."""

    def __init__(self, identities: int, width: int = 64) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 7 * 7, width),
        )  # fmt: skip
        self.centres = nn.Parameter(torch.randn(identities, width))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.linear(F.normalize(self.cnn(images)), F.normalize(self.centres))


def margin_loss(cosine: torch.Tensor, labels: torch.Tensor, margin: float, scale: float) -> torch.Tensor:
    """Cross-entropy where the right identity has to win by an angle: cos(t + m) in the place of cos(t)."""
    sine = (1.0 - cosine.square()).clamp(min=1e-6).sqrt()
    harder = cosine * math.cos(margin) - sine * math.sin(margin)
    right = labels[:, None] == torch.arange(cosine.shape[1], device=labels.device)
    return F.cross_entropy(scale * torch.where(right, harder, cosine), labels)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor):
    optimizer.zero_grad()
    loss = margin_loss(model(images), labels, margin=0.3, scale=24.0)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss


def batch(faces: torch.Tensor, size: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random faces, shifted, flipped, with another contrast and noise; the same on every rank."""
    draw = torch.Generator().manual_seed(number)
    labels = torch.randint(len(faces), (size,), generator=draw)
    images = F.pad(faces[labels], (2, 2, 2, 2), mode="replicate")
    x, y = torch.randint(5, (2,), generator=draw).tolist()
    images = images[..., y : y + 25, x : x + 25]
    flip = torch.rand(size, 1, 1, 1, generator=draw) < 0.5
    images = torch.where(flip, images.flip(-1), images)
    contrast = 0.8 + 0.4 * torch.rand(size, 1, 1, 1, generator=draw)
    return images * contrast + 0.1 * torch.randn(images.shape, generator=draw), labels


def photographs() -> torch.Tensor:
    """The 100 faces of scikit-image's wheel, one identity each."""
    faces = torch.from_numpy(np.ascontiguousarray(lfw_subset()[:100])).float()[:, None]
    return (faces - faces.mean()) / faces.std()


def job(identities: int = 50_000, size: int = 64):
    """(step, args) for `distpar plan examples/face.py:job`."""
    torch.manual_seed(0)
    model = FaceNet(identities)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return train_step, (model, optimizer, *batch(photographs(), size, 0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--identities", type=int, default=50_000)
    options = parser.parse_args()
    step, (model, optimizer, *_) = job(options.identities)
    step = distpar.parallelize(step)
    faces = photographs()
    losses = [float(step(model, optimizer, *batch(faces, 64, number))) for number in range(options.steps)]
    if os.environ.get("RANK", "0") == "0":
        print("losses", " ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
