"""Parameters, gradients and activations off the device: on the host or on disk."""
