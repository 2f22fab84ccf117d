"""The token that lets a process use a rendezvous store: a file that only its owner can read. No torch."""

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from danlu.comm.store_channel import TOKEN_BYTES


class StoreTokenError(RuntimeError):
    """A token cannot be written, or must not be used; the message says why."""


def user_token_path(environment: Mapping[str, str]) -> Path:
    """Where a user's own token is, for processes that are started by hand on several hosts with one home."""
    data = environment.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "danlu" / "store-token"


def make_token(path: Path) -> None:
    """Write a new token unless there is one; of several processes that do so at once all find the same."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.touch(mode=0o600, exist_ok=False)
        with fresh.open("w") as file:
            file.write(secrets.token_hex(TOKEN_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(fresh, path)
    except OSError as error:
        raise StoreTokenError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        fresh.unlink(missing_ok=True)


def read_token(path: Path) -> bytes:
    """The token in a file; raises `StoreTokenError` if others may know it."""
    try:
        with path.open() as file:
            found, text = os.fstat(file.fileno()), file.read(4 * TOKEN_BYTES).strip()
    except OSError as error:
        raise StoreTokenError(f"{path} must have the token of the store, but: {error.strerror}") from None
    if found.st_mode & 0o077:
        raise StoreTokenError(
            f"{path} must be readable by its owner alone, but its mode is {found.st_mode & 0o777:o}: others may know "
            "the token; delete the file, and a new one is made"
        )
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise StoreTokenError(f"{path} must have {2 * TOKEN_BYTES} hexadecimal digits, but has another content")
    return token
