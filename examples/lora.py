"""Adapters on a frozen base that is streamed from the host: python examples/lora.py"""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import memscale

config = LlamaConfig(
    vocab_size=1000, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4
)
model = get_peft_model(
    LlamaForCausalLM(config), LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
)
model = memscale.wrap(model, memscale.Config(force_optimize=True))  # forced, as it is tiny
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
tokens = torch.randint(1000, (4, 64))
for step in range(3):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
memscale.detach(model)
