"""The two jobs: faces of many identities, and the source text of Python's own library. Ordinary PyTorch."""

from __future__ import annotations

import copy
import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Job:
    """A job to train.

    Attributes:
        size: samples in a batch.
        make: fresh (model, optimizer, scheduler or None), the same at every call.
        batch: the data of one step, by its number; the same on every rank.
        score: what a plain model reaches on fresh data, as a line of text.
    """

    title: str
    size: int
    step: Callable[..., Any]
    make: Callable[[], tuple[nn.Module, Any, Any]]
    batch: Callable[[int], tuple[torch.Tensor, ...]]
    score: Callable[[nn.Module], str]


class FaceNet(nn.Module):
    """A small CNN with batch norm, and a centre for each identity; gives the cosine to every centre."""

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


def face_step(model: nn.Module, optimizer: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    cosine = model(images)
    sine = (1.0 - cosine.square()).clamp(min=1e-6).sqrt()
    harder = cosine * math.cos(0.3) - sine * math.sin(0.3)
    right = labels[:, None] == torch.arange(cosine.shape[1], device=labels.device)
    loss = F.cross_entropy(24.0 * torch.where(right, harder, cosine), labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss


def photographs() -> torch.Tensor:
    """The 100 faces that scikit-image's wheel ships, one identity each."""
    from skimage.data import lfw_subset

    faces = torch.tensor(lfw_subset()[:100], dtype=torch.float32)[:, None]
    return (faces - faces.mean()) / faces.std()


def augment(images: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Shift, flip, contrast, noise."""
    padded = F.pad(images, (2, 2, 2, 2), mode="replicate")
    x, y = torch.randint(5, (2,), generator=draw).tolist()
    shifted = padded[..., y : y + 25, x : x + 25]
    count = len(images)
    flipped = torch.where(torch.rand(count, 1, 1, 1, generator=draw) < 0.5, shifted.flip(-1), shifted)
    contrast = 0.8 + 0.4 * torch.rand(count, 1, 1, 1, generator=draw)
    return flipped * contrast + 0.1 * torch.randn(flipped.shape, generator=draw)


def face(identities: int, steps: int) -> Job:
    """Face recognition: 100 identities have a photograph, the others are negatives."""
    faces, size = photographs(), 64

    def make() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        model = FaceNet(identities)
        return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), None

    def batch(number: int) -> tuple[torch.Tensor, ...]:
        draw = torch.Generator().manual_seed(number)
        labels = torch.randint(100, (size,), generator=draw)
        return augment(faces[labels], draw), labels

    def score(model: nn.Module) -> str:
        draw = torch.Generator().manual_seed(10**6)
        model = copy.deepcopy(model).eval()
        with torch.no_grad():
            hits = [model(augment(faces, draw)).argmax(1) == torch.arange(100) for _ in range(3)]
        return f"{torch.cat(hits).float().mean():.1%} of fresh augmentations recognised among {identities:,} identities"

    title = f"Face recognition: 100 photographed identities and {identities - 100:,} negatives without a photograph"
    return Job(title, size, face_step, make, batch, score)


def lm_step(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def source_tokens(vocabulary: int) -> torch.Tensor:
    """A part of the standard library's source text, by a byte-pair tokenizer trained on it on the spot."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return torch.tensor([token for one in tokenizer.encode_batch(texts) for token in one.ids])


def lm(steps: int) -> Job:
    """Language modelling: a small GPT-2, tied embeddings, dropout on, warm-up and cosine schedule."""
    size, length, vocabulary = 16, 64, 1024
    data = source_tokens(vocabulary)
    kept = len(data) * 9 // 10

    def make() -> tuple[nn.Module, Any, Any]:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=vocabulary, n_positions=length, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
        model = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"
        decayed = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3)

        def rate(number: int) -> float:
            return min(1.0, (number + 1) / 5) * 0.5 * (1 + math.cos(math.pi * min(1.0, number / steps)))

        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def window(start: int, stop: int, draw: torch.Generator) -> torch.Tensor:
        starts = torch.randint(start, stop - length, (size, 1), generator=draw)
        return data[starts + torch.arange(length)]

    def batch(number: int) -> tuple[torch.Tensor, ...]:
        return (window(0, kept, torch.Generator().manual_seed(number)),)

    def score(model: nn.Module) -> str:
        draw = torch.Generator().manual_seed(10**6)
        model = copy.deepcopy(model).eval()
        with torch.no_grad():
            tokens = [window(kept, len(data), draw) for _ in range(4)]
            losses = [float(model(input_ids=t, labels=t).loss) for t in tokens]
        return f"loss {sum(losses) / 4:.3f} on text that was held back"

    title = f"Language modelling: GPT-2, {len(data):,} tokens of the standard library's source"
    return Job(title, size, lm_step, make, batch, score)
