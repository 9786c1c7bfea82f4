"""The door of a files store: which directory is meant, whose it is, whether it can be written."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

from kvtier.errors import ConfigError
from kvtier.storage_backends.files_folder import Folder
from kvtier.storage_backends.files_usage import is_count
from kvtier.storage_backends.slab_directory import config_error

_FORMAT: Final = b"kvtier files store, format 1\n"


def prepare(folder: Folder) -> None:
    """Mark a new directory, refuse one that is another's, and write to it. Raises OSError too."""
    _check_format(folder)
    _self_test(folder)


def check_made(directory: Path) -> None:
    """Raise ConfigError for a directory that no files store has marked, and make nothing."""
    try:
        (directory / "format").stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"there is no files store in {directory}; mount it, or correct the path"
        ) from error
    except OSError as error:
        raise config_error(error, directory) from error


def directory_of(location: str) -> Path:
    """Return a path that the system takes; ``~`` is a home directory, as in a shell.

    Raises ConfigError.
    """
    try:
        path = Path(location).expanduser()
        usable = "\0" not in str(path) and bool(location) and bool(str(path).encode())
    except (ValueError, RuntimeError):  # a name that is no text; the home of nobody
        usable = False
    if not usable or location.startswith("//"):
        raise ConfigError(
            f"files:{location!r} names no directory; mount it, and write the tier like "
            f"files:/mnt/kv?capacity=10TiB"
        )
    return path


def refusal(error: OSError, directory: Path) -> ConfigError:
    """Return what an operator needs to know about a call that failed while opening."""
    if isinstance(error, FileNotFoundError):
        return ConfigError(
            f"{directory}: ENOENT (there is no {directory.parent}); mount it, or make it"
        )
    return config_error(error, directory)


def _check_format(folder: Folder) -> None:
    """Mark a new directory as ours; refuse one that another store, or version, has marked."""
    try:
        descriptor = folder.look("format")
    except FileNotFoundError:
        if not is_count(folder):
            raise ConfigError(
                f"{folder.path} is no files store, and has a file of the name usage that such a "
                f"one writes to; choose another directory"
            ) from None
        _replace(folder, "format", _FORMAT)
        return
    try:
        found = os.pread(descriptor, 80, 0)
    finally:
        os.close(descriptor)
    if found != _FORMAT:
        raise ConfigError(
            f"{folder.path} has {found!r}, and files knows only {_FORMAT!r}; use what wrote it, "
            f"or choose another directory"
        )


def _self_test(folder: Folder) -> None:
    """Write, rename and remove a file."""
    name = f"selftest-{secrets.token_hex(8)}"
    _replace(folder, name, b"kvtier")
    folder.unlink(name)


def _replace(folder: Folder, name: str, content: bytes) -> None:
    """Write a small file whole or not at all, durably."""
    draft = f"{name}.{secrets.token_hex(8)}"
    descriptor = folder.change(draft, new=True)
    try:
        folder.write(descriptor, [memoryview(content)])
        folder.sync(descriptor)
        folder.rename(draft, name)
    except BaseException:
        with contextlib.suppress(OSError):
            folder.unlink(draft)
        raise
    finally:
        os.close(descriptor)
    folder.sync_names(".")
