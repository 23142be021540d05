"""The models that must train equal to one device: each function gives a fresh (step, args) in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Job = tuple[Callable[..., Any], tuple[Any, ...]]


class Mlp(nn.Module):
    """Prime widths: nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 11)
        self.drop = nn.Dropout(0.25)
        self.down = nn.Linear(11, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.tanh(self.up(x))))


def mlp(batch: int) -> Job:
    torch.manual_seed(0)
    model = Mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return {"loss": loss, "logits": logits}

    return step, (model, optimizer, torch.randn(batch, 7).double(), torch.randint(13, (batch,)))


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def _lm_step(model: nn.Module, optimizer: Any, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
    optimizer.zero_grad(set_to_none=True)
    logits = model(input_ids=tokens).logits
    # The library's own loss goes through float32; here everything stays in the model's dtype.
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss, norm


def gpt2(batch: int) -> Job:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=257, n_positions=16, n_embd=48, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    model.loss_type = "ForCausalLM"
    optimizer = torch.optim.AdamW(_groups(model), lr=1e-3)
    tokens = torch.randint(257, (batch, 9))
    return _lm_step, (model, optimizer, tokens, tokens)


def llama(batch: int) -> Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=131, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for module in list(model.modules()):
        for name, child in module.named_children():
            # The library's own norm goes through float32.
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(module, name, nn.RMSNorm(32, eps=1e-6))
    model = model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    tokens = torch.randint(131, (batch, 7))
    return _lm_step, (model, optimizer, tokens, tokens)


def bert(batch: int) -> Job:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=101, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37,
        max_position_embeddings=16,
    )  # fmt: skip
    model = BertForMaskedLM(config).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens = torch.randint(101, (batch, 8))
    labels = torch.where(torch.rand(batch, 8) < 0.3, tokens, -100)
    labels[0, 1] = tokens[0, 1]
    return _lm_step, (model, optimizer, tokens, labels)


class Block(nn.Module):
    """A residual block as ResNet-18 has it."""

    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(narrow, wide, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(wide)
        self.second = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(wide)
        self.short = nn.Sequential(nn.Conv2d(narrow, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.layers = nn.Sequential(Block(6, 6, 1), Block(6, 10, 2))
        self.head = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        return self.head(F.adaptive_avg_pool2d(self.layers(x), 1).flatten(1))


def _class_step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def resnet(batch: int) -> Job:
    torch.manual_seed(0)
    model = ResNet().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    return _class_step, (model, optimizer, torch.randn(batch, 3, 19, 19).double(), torch.randint(5, (batch,)))


class ArcFace(nn.Module):
    """A small CNN with batch norm; cosine logits with an angular margin at the target, scaled."""

    def __init__(self, identities: int, width: int = 16) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3, 2, 1)
        self.norm = nn.BatchNorm2d(5)
        self.embed = nn.Linear(5 * 5 * 5, width)
        self.centres = nn.Parameter(torch.randn(identities, width))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        features = self.embed(F.relu(self.norm(self.conv(x))).flatten(1))
        cosine = F.linear(F.normalize(features), F.normalize(self.centres)).clamp(-0.999, 0.999)
        hit = F.one_hot(y, self.centres.shape[0]).bool()
        margin = torch.cos(torch.acos(cosine) + 0.5)
        return 16.0 * torch.where(hit, margin, cosine)


def _face_step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x, y), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    return loss


def arcface(batch: int, identities: int = 23) -> Job:
    torch.manual_seed(0)
    model = ArcFace(identities).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(batch, 1, 10, 10).double(), torch.randint(identities, (batch,))
    return _face_step, (model, optimizer, x, y)


class TiedLm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        return self.head(x + F.gelu(self.mix(x)))


def tied(batch: int) -> Job:
    """Tied embedding and head; ignored targets, a different number in every row, one row without any."""
    torch.manual_seed(0)
    model = TiedLm().double()
    model.mix.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    tokens = torch.randint(10, (batch, 5))
    labels = tokens.clone()
    for row in range(batch):
        labels[row, : min(5, row)] = -100

    def step(model: nn.Module, optimizer: Any, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        return loss

    return step, (model, optimizer, tokens, labels)


MODELS: dict[str, Callable[[int], Job]] = {
    "mlp": mlp, "gpt2": gpt2, "llama": llama, "bert": bert, "resnet": resnet, "arcface": arcface, "tied": tied,
}  # fmt: skip
