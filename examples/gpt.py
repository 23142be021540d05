"""Language modelling: a small GPT-2 from transformers on the source text of Python's standard library.

    python examples/gpt.py                                    one rank
    torchrun --nproc-per-node 4 examples/gpt.py               four ranks
    distpar plan examples/gpt.py:job --ranks 4                only the plan

Needs transformers and tokenizers.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import distpar

VOCABULARY, LENGTH = 2048, 64


@cache
def tokens() -> torch.Tensor:
    """The text of some modules of the standard library, by a byte-pair tokenizer trained on it."""
    from tokenizers import ByteLevelBPETokenizer

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=VOCABULARY, show_progress=False)
    return torch.tensor(tokenizer.encode(text).ids)


def batch_of(number: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(tokens()) - LENGTH, (batch,), generator=generator)
    return torch.stack([tokens()[start : start + LENGTH] for start in starts.tolist()])


def train_step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    logits = model(input_ids=batch).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def job(batch: int = 8, width: int = 128, layers: int = 2) -> tuple[Any, tuple[Any, ...]]:
    """The step and its arguments, for `distpar plan` and `distpar bench`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=width, n_layer=layers, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return train_step, (model, optimizer, batch_of(0, batch))


def schedule(optimizer: Any, steps: int) -> Any:
    """Warm-up over a tenth of the steps, then a cosine to zero."""
    warm = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.5 + 0.5 * float(torch.cos(torch.tensor(torch.pi * (step - warm) / max(1, steps - warm))))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    step, (model, optimizer, _) = job()
    scheduler = schedule(optimizer, options.steps)
    step = distpar.parallelize(step)
    losses = []
    for number in range(options.steps):
        losses.append(float(step(model, optimizer, batch_of(number, 8)).detach()))
        scheduler.step()
    if os.environ.get("RANK", "0") == "0":
        print(step.plan)
        print("losses", " ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
