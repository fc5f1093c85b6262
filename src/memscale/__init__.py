"""Fit PyTorch training into the memory you have."""
