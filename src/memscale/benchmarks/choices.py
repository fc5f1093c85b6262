"""Errors about names that are not on a list: what is allowed, and what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from memscale.errors import ConfigError, shown

__all__ = ["unknown_name"]


def unknown_name(kind: str, name: object, allowed: Iterable[str]) -> ConfigError:
    """The error for a `name` that is none of the `allowed` ones.

    Example:
        >>> print(unknown_name("model", "gpt2xl", ["bert-base", "gpt2-xl"]))
        There is no model 'gpt2xl'; did you mean gpt2-xl? Allowed: bert-base, gpt2-xl.
    """
    names = list(allowed)
    near = get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]}?" if near else "."
    return ConfigError(f"There is no {kind} {shown(name)}{guess} Allowed: {', '.join(names)}.")
