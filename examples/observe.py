"""Train a small model on the CPU, its layers on disk, and see what the plan did: python examples/observe.py"""

from __future__ import annotations

import urllib.request

import torch
from torch import nn

import memscale

STEPS = 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 256)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(6)
        )
        self.head = nn.Linear(256, 1000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main() -> None:
    torch.manual_seed(0)
    model, ids = Model(), torch.randint(0, 1000, (4, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    config = memscale.Config(
        mode="aggressive",
        force_optimize=True,
        use_mixed_precision=False,
        use_8bit_optimizer=False,
        observability_port=0,
        enable_logging=False,
    )
    with memscale.optimize(model, optimizer, config, ids) as executor:
        for _ in range(STEPS):
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(executor.report())
        assert executor.metrics is not None
        assert executor.metrics.url is not None
        with urllib.request.urlopen(executor.metrics.url) as answer:
            text = answer.read().decode()
    print("\n".join(line for line in text.splitlines() if "moved_bytes" in line or "lost_seconds" in line))


if __name__ == "__main__":
    main()
