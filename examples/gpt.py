"""A small GPT-2 on the source text of Python's standard library, written for one device.

    python examples/gpt.py
    torchrun --nproc-per-node 4 examples/gpt.py --steps 50
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
from pathlib import Path

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import distpar

SIZE, LENGTH = 16, 64


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor):
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def text() -> torch.Tensor:
    """Bytes of a part of the standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch(data: torch.Tensor, number: int) -> torch.Tensor:
    """Random windows of the text; the same on every rank."""
    starts = torch.randint(len(data) - LENGTH, (SIZE, 1), generator=torch.Generator().manual_seed(number))
    return data[starts + torch.arange(LENGTH)].long()


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=96, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=3e-3)


def job():
    """(step, args) for `distpar plan examples/gpt.py:job`."""
    return train_step, (*make_model(), batch(text(), 0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    model, optimizer = make_model()
    data = text()

    def rate(number: int) -> float:
        return min(1.0, (number + 1) / 5) * 0.5 * (1 + math.cos(math.pi * number / options.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    step = distpar.parallelize(train_step)
    losses = []
    for number in range(options.steps):
        losses.append(float(step(model, optimizer, batch(data, number))))
        schedule.step()
    if os.environ.get("RANK", "0") == "0":
        print("losses", " ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
