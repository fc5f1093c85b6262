"""Memory below the device: tiers, homes of parameters, streamed optimizer steps."""
