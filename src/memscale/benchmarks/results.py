"""What the suite found: one row a case, and the JSON document that holds the rows."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TypeAlias, get_type_hints

from memscale.errors import ConfigError, shown

__all__ = ["SCHEMA", "Results", "Row", "Source", "write_atomically"]

SCHEMA = 1

Source: TypeAlias = Literal["simulated", "measured"]


@dataclass(frozen=True)
class Row:
    """One model trained in one mode on one device.

    Attributes:
        model: Its name in the registry.
        params: Parameters; tied ones once.
        batch: Samples in a batch.
        seq: Tokens in a sample.
        mode: How MemScale was applied; "none" is the plain model.
        on: The device as it was asked for.
        source: "simulated" on the virtual GPU (tensor memory in blocks of CUDA's allocator), or "measured" on
            the CPU (peak RSS of a fresh process above what it had after its imports).
        baseline_bytes: The peak in mode "none"; None if that does not fit.
        peak_bytes: The most device memory in use at once; None if the case does not fit.
        host_bytes: The most host memory that tensors had while the model trained; 0 where the host is the
            device.
        disk_bytes: The most disk space that tensors had.
        reduction: 1 - peak / baseline; None where one of the two is missing.
        time_ratio: Time of a step relative to mode "none"; None where it is not known.
        note: Why there is no peak. Only in rows that need it.
        tensor_bytes: Measured cases, on request: the peak of tensor bytes alone, to the byte.
    """

    model: str
    params: int
    batch: int
    seq: int
    mode: str
    on: str
    source: Source
    baseline_bytes: int | None
    peak_bytes: int | None
    host_bytes: int
    disk_bytes: int
    reduction: float | None
    time_ratio: float | None
    note: str | None = None
    tensor_bytes: int | None = None

    def to_dict(self) -> dict[str, object]:
        """The row as JSON has it: `note` and `tensor_bytes` only where they say something."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None or name not in _OPTIONAL}

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Row:
        """The row that `to_dict` wrote.

        Raises:
            ConfigError: A field is missing, unknown, or of the wrong type.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"A row of results is an object with fields; got {shown(values)}.")
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in values and name not in _OPTIONAL]
        unknown = [name for name in values if name not in names]
        if missing or unknown:
            raise ConfigError(
                f"A row of results lacks the fields {', '.join(missing) or '(none)'} and has the unknown "
                f"fields {', '.join(map(str, unknown)) or '(none)'}: make the file anew with "
                "python -m memscale.benchmarks."
            )
        for name, value in values.items():
            if not _fits(name, value):
                raise ConfigError(f"A row of results has {name}={shown(value)}, which is of the wrong type.")
        return cls(**values)  # type: ignore[arg-type]


_OPTIONAL = ("note", "tensor_bytes")


def _fits(name: str, value: object) -> bool:
    hint = get_type_hints(Row)[name]
    if hint == Source:
        return value in ("simulated", "measured")
    if isinstance(value, bool):
        return False
    allowed = hint | int if hint == float | None else hint  # 1.0 is 1 to some JSON writers
    return isinstance(value, allowed)


@dataclass(frozen=True)
class Results:
    """The rows of one run of the suite, and how to make them again.

    Attributes:
        command: The command line that made them.
        torch: The version of torch.
        transformers: The version of transformers.
        rows: In the order they were run.
    """

    command: str
    torch: str
    transformers: str
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """The document as text, indented, ending in a newline."""
        document = {
            "schema": SCHEMA,
            "command": self.command,
            "torch": self.torch,
            "transformers": self.transformers,
            "rows": [row.to_dict() for row in self.rows],
        }
        return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        """The results that `to_json` wrote.

        Raises:
            ConfigError: The text is not such a document.

        Example:
            >>> results = Results("python -m memscale.benchmarks", "2.13.0", "5.22.0", ())
            >>> Results.from_json(results.to_json()) == results
            True
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"Not JSON: {error}.") from None
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise ConfigError(
                f'Not results of python -m memscale.benchmarks, which have "schema": {SCHEMA} at the top; '
                f"got {shown(document)}."
            )
        command, torch, transformers, rows = (
            document.get(name) for name in ("command", "torch", "transformers", "rows")
        )
        if not (
            isinstance(command, str)
            and isinstance(torch, str)
            and isinstance(transformers, str)
            and isinstance(rows, list)
        ):
            raise ConfigError("Results need command, torch and transformers as text, and a list of rows.")
        return cls(command, torch, transformers, tuple(map(Row.from_dict, rows)))

    def write(self, path: Path) -> None:
        """Write the document to a file, which holds either all of it or what it held before."""
        write_atomically(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read what `write` wrote.

        Raises:
            ConfigError: The file cannot be read, or is something else; the message names it.
        """
        try:
            return cls.from_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from None


def write_atomically(path: Path, text: str) -> None:
    """Replace the file by one with this text, at once; its permissions stay."""
    try:
        mode = path.stat().st_mode & 0o777
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        mode = 0o666 & ~umask
    path = path.resolve()  # through a link: what it points at is replaced, not the link
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", newline="", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        temporary = Path(file.name)
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            temporary.chmod(mode)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
