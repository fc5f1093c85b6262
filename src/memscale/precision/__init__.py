"""Mixed precision: autocast around the model's forward, and loss scaling for fp16."""
