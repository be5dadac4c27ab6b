"""Files that are whole or not there: written beside their place, and then moved into it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    if path.exists() and not path.is_file():  # a pipe, /dev/stdout
        path.write_bytes(content)
        return
    path = Path(os.path.realpath(path))  # a link stays one
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """An error of the disk names the file, and what to do."""
    try:
        yield
    except OSError as e:
        there = "What was there stays. " if path.exists() else ""
        advice = "Free some room, or make it writable, and give the same command again."
        raise OSError(f"{path} cannot be written ({e.strerror or e}). {there}{advice}") from e
