"""A plain PyTorch loop with one more line: python examples/plain_loop.py"""

import torch
from torch import nn

import memscale

WIDTH, DEPTH, CLASSES = 256, 8, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, CLASSES)).to(device)
model = memscale.wrap(model, memscale.Config(force_optimize=True))  # forced, as it is tiny
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    inputs = torch.randn(512, WIDTH, device=device)
    loss = nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
print(model._memscale_executor.report())
memscale.detach(model)
