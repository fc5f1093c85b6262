"""The optimizer step: where its state is, and how it is stepped."""
