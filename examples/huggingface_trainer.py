"""The Hugging Face Trainer, its own gradient checkpointing taken over: python examples/huggingface_trainer.py"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import memscale

model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=4, n_head=4))
tokens = [torch.randint(256, (64,)) for _ in range(16)]
data = [{"input_ids": each, "labels": each} for each in tokens]
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        directory,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=2,
        gradient_checkpointing=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    memscale.wrap(trainer, memscale.Config(force_optimize=True))  # forced, as it is tiny
    trainer.train()
    print(model._memscale_executor.plan)
    memscale.detach(trainer)
    trainer.save_model(directory)
