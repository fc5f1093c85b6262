"""Every error that MemScale raises on purpose, in one small tree.

Each also derives from the built-in a caller would expect (`ValueError`, `TypeError`, `RuntimeError`), so code
that knows nothing of MemScale can catch it too.
"""

from __future__ import annotations


class MemScaleError(Exception):
    """The root of the tree: catch this to catch every error MemScale raises on purpose."""


class ConfigError(MemScaleError, ValueError):
    """A setting has the right type and a value that is not allowed."""


class ConfigTypeError(MemScaleError, TypeError):
    """A setting has the wrong type, or there is no setting of that name."""


class DoesNotFitError(MemScaleError, RuntimeError):
    """No plan makes a model and its batch fit the device or the budget."""


class HardwareError(MemScaleError, ValueError):
    """A device is unknown, or its description is impossible."""


class SimulationError(MemScaleError, RuntimeError):
    """A training step could not be run on the virtual GPU."""


class ProfileError(MemScaleError, RuntimeError):
    """A model, or the memory of a process, could not be measured."""


class PlanError(MemScaleError, ValueError):
    """A plan is not readable: broken JSON, unknown fields, or values that contradict each other."""


class PolicyError(MemScaleError, RuntimeError):
    """The file of the learned policy (`Config.auto_policy`) is missing or damaged."""


class RecomputeError(MemScaleError, RuntimeError):
    """Recomputing a checkpointed region gave something other than its forward did."""


class TierError(MemScaleError, RuntimeError):
    """A tier of offloaded tensors can't do what was asked: closed, forked, or its directory is unusable."""


class TierFullError(TierError):
    """A tensor does not fit in a tier: its cap is reached, or its disk is full. Nothing was stored."""


class TransferError(TierError):
    """A copy to or from a tier failed; the cause is chained."""


class VerificationError(MemScaleError, RuntimeError):
    """A step with the plan did not compute what a step of the plain model does (`Config.verify_correctness`)."""


class WeightsError(MemScaleError, RuntimeError):
    """Weights could not be read from files, or do not fit the model. The model is as it was."""


class WrapError(MemScaleError, RuntimeError):
    """A plan could not be attached to a model, or not detached from it."""


class WrapTypeError(MemScaleError, TypeError):
    """Something was given to be wrapped that is neither a module nor a trainer."""


def shown(value: object, limit: int = 80) -> str:
    """Return the `repr` of a value on one line, cut to `limit`, for a message.

    >>> shown("6 parsecs"), shown([0] * 100, limit=12)
    ("'6 parsecs'", '[0, 0, 0, 0…')
    """
    try:
        text = " ".join(repr(value).split())
    except Exception:  # 10**5000 has no repr
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out on a device or, for which torch raises a plain ``RuntimeError``, on the host.

    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to ..."))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    import torch  # here, as `import memscale` does not import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    # The last two: cuBLAS and cuDNN, which allocate by themselves (CUBLAS_STATUS_ALLOC_FAILED,
    # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED).
    signs = ("out of memory", "not enough memory", "status_alloc_failed", "allocation_failed")
    return any(sign in text for sign in signs)
