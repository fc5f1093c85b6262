"""A model that never exists whole in memory: python examples/larger_than_memory.py [--layers 48 --width 1600]

Its tensors are made on disk, layer by layer. With the arguments above it is GPT-2 XL: 6 GB of weights and 19 GB of
gradients and optimizer state on disk, trained in about 1 GB of RAM.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import memscale

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
options = parser.parse_args()
with torch.device("meta"):  # shapes only
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=options.layers, n_embd=options.width, n_head=options.width // 64)
    )
tokens = torch.randint(50257, (1, 128))
batch = {"input_ids": tokens, "labels": tokens}
model = memscale.wrap(model, memscale.Config(mode="aggressive", use_mixed_precision=False), batch)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(2):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
executor = model._memscale_executor
print(
    f"on disk: {executor.bytes_on_disk / 2**20:.1f} MiB; {executor.report().bytes_read / 2**20:.1f} MiB were read"
)
