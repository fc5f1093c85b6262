"""A stand-in for the CUDA runtime, so that the CUDA build of torch runs on a machine without a GPU. See README.md."""
