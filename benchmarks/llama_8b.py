"""How long and with how much memory an 8-billion-parameter Llama step is planned on a machine without GPUs.

    python benchmarks/llama_8b.py [--layers 32] [--ranks 8]

The shape is Llama-3-8B's: 32 layers, width 4096, 32 query and 8 key-value heads, 14336 wide MLP, 128256 tokens; bf16
parameters on `meta`, AdamW, one sequence of 2048 tokens a rank; the cluster is the dgx-h100 preset.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import distpar
from distpar.capture import capture
from distpar.cost.cluster import Cluster
from distpar.pose import make_plan


def train_step(model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def job(layers: int = 32, batch: int = 8, length: int = 2048) -> tuple[Any, tuple[Any, ...]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(batch, length, dtype=torch.int64)
    return train_step, (model, torch.optim.AdamW(model.parameters(), lr=1e-4), tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    step, args = job(options.layers, options.ranks)
    begun = time.perf_counter()
    captured = capture(step, args, {})
    traced = time.perf_counter()
    print(f"captured {len(captured.graph.nodes)} nodes in {traced - begun:.1f} s", flush=True)
    limits = distpar.Options(time_limit=60, gap=0.01)
    plan = make_plan(captured.graph, distpar.Mesh(ranks=options.ranks), Cluster.preset("dgx-h100"), limits, {})
    ended = time.perf_counter()
    print(plan)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"planned in {ended - traced:.1f} s; {ended - begun:.1f} s in all, {peak:.2f} GiB at most")


if __name__ == "__main__":
    main()
