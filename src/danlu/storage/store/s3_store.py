"""A store in an S3 bucket, by s3fs: large files by multipart upload, small ones in one request, create-if-absent."""

import secrets
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import chain
from typing import Any, Self

from danlu.storage.store.safe_path import Buffer, byte_view, check_path, short_read_error

DEFAULT_OPTIONS = {
    "endpoint": "",
    "region": "",
    "part_bytes": str(64 << 20),
    "connect_timeout": "5",
    "read_timeout": "30",
    "request_timeout": "300",
}
"""The options, with their defaults."""

_MIN_PART_BYTES = 5 << 20  # S3's minimum, except for the last part
_MAX_PARTS = 10_000
_MAX_IN_FLIGHT = 4
_MAX_KEYS_PER_DELETE = 1000  # S3's maximum


class S3Store:
    """Files as objects under a prefix of a bucket, which must exist.

    An object appears when its upload is complete, never in part. Nothing is retried and every request ends: a server
    that dies gives a ConnectionError after `connect_timeout` or `read_timeout` seconds, one that is silent after
    `request_timeout` (waiting for a connection has no timeout of its own). What an interrupted upload leaves is
    invisible and billed: give the bucket a lifecycle rule that aborts incomplete uploads.
    """

    def __init__(self, files: Any, bucket: str, prefix: str, part_bytes: int, request_timeout: float) -> None:
        """`files` is an `s3fs.S3FileSystem`; `from_address` creates one."""
        self._files = files
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._part_bytes = part_bytes
        self._request_timeout = request_timeout
        self._conditional_writes_ok = False
        self._lock = threading.Lock()
        self.name = f"s3://{bucket}/{prefix}".rstrip("/")

    @classmethod
    def from_address(cls, address: str, options: Mapping[str, str]) -> Self:
        """The store at `bucket/prefix`, with `options` as `open_store` describes them."""
        bucket, _, prefix = address.partition("/")
        prefix = prefix.rstrip("/")
        if not bucket:
            raise ValueError(f"s3://{address} must name a bucket: s3://bucket/prefix")
        if prefix:
            check_path(prefix)
        chosen = {**DEFAULT_OPTIONS, **_check_option_names(options)}
        part_bytes = int(_parse_number("part_bytes", chosen["part_bytes"], _MIN_PART_BYTES))
        request_timeout = _parse_number("request_timeout", chosen["request_timeout"], 0.1)
        return cls(_open_filesystem(chosen), bucket, prefix, part_bytes, request_timeout)

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        """Create or replace a file."""
        key = self._key(path)
        chunks = _chunks(parts, self._part_bytes)
        first = next(chunks, b"")
        second = next(chunks, None)
        with self._translate_errors(f"writing {path}"):
            if second is None:
                self._call("put_object", Key=key, Body=first)
            else:
                self._multipart_upload(path, key, first, second, chunks)

    def create(self, path: str, data: Buffer) -> None:
        """Create a file; FileExistsError if there is one. Needs a server that supports If-None-Match."""
        key = self._key(path)
        self._check_conditional_writes()
        if not self._put_if_absent(key, bytes(byte_view(data)), path):
            raise FileExistsError(f"{self.name}: {path} already exists")

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from `offset`."""
        wanted = max(0, self.size(path) - offset) if length is None else length
        if not wanted:
            if offset > (size := self.size(path)):
                raise short_read_error(self.name, path, offset, wanted, size)
            return b""
        return self._read_range(path, offset, wanted)

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`, in ranges that are fetched concurrently."""
        target = byte_view(into)
        if not len(target):
            self.read(path, offset, 0)
            return

        def fetch(start: int) -> None:
            piece = target[start : start + self._part_bytes]
            piece[:] = self._read_range(path, offset + start, len(piece))

        with ThreadPoolExecutor(_MAX_IN_FLIGHT, thread_name_prefix="danlu-fetch") as pool:
            deque(pool.map(fetch, range(0, len(target), self._part_bytes)), maxlen=0)

    def size(self, path: str) -> int:
        """Bytes in a file."""
        with self._translate_errors(f"looking for {path}"):
            return int(self._call("head_object", Key=self._key(path))["ContentLength"])

    def list(self, folder: str = "") -> list[str]:
        """Names directly inside a folder."""
        start = f"{self._key(folder)}/" if folder else self._prefix
        names: set[str] = set()
        with self._translate_errors(f"listing {folder or 'all'}"):
            for page in self._list_pages(Prefix=start, Delimiter="/"):
                found = [item["Key"] for item in page.get("Contents", ())]
                found += [item["Prefix"] for item in page.get("CommonPrefixes", ())]
                names.update(key[len(start) :].rstrip("/") for key in found)
        return sorted(names - {""})

    def remove(self, path: str) -> None:
        """Remove a file or a folder."""
        key = self._key(path)
        with self._translate_errors(f"removing {path}"):
            self._call("delete_object", Key=key)
            inside = [item["Key"] for page in self._list_pages(Prefix=f"{key}/") for item in page.get("Contents", ())]
            # Some servers keep a folder as an object of its own, and list it when it is empty.
            folders = {f"{name[:end]}/" for name in inside for end in _folder_ends(name) if end >= len(key)}
            self._delete([*inside, *sorted(folders, key=len, reverse=True)])

    def remove_except(self, folder: str, keep: str) -> None:
        """Remove the objects of a folder except those with the prefix `keep`."""
        for name in self.list(folder):
            if not name.startswith(keep):
                self.remove(f"{folder}/{name}")

    def free_bytes(self) -> int | None:
        """Unknown: a bucket has no size, and the protocol has no quota."""
        return None

    def _key(self, path: str) -> str:
        return self._prefix + check_path(path)

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._files.call_s3(method, timeout=self._request_timeout, Bucket=self._bucket, **arguments)

    def _delete(self, keys: Sequence[str]) -> None:
        for begin in range(0, len(keys), _MAX_KEYS_PER_DELETE):
            doomed = [{"Key": key} for key in keys[begin : begin + _MAX_KEYS_PER_DELETE]]
            answer = self._call("delete_objects", Delete={"Objects": doomed, "Quiet": True})
            if left := answer.get("Errors"):
                raise OSError(
                    f"{len(left)} files were not deleted, the first is {left[0]['Key']}: {left[0].get('Message')}"
                )

    def _list_pages(self, **arguments: Any) -> Iterator[Mapping[str, Any]]:
        following: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", **arguments, **following)
            yield page
            if not page.get("IsTruncated"):
                return
            following = {"ContinuationToken": page["NextContinuationToken"]}

    def _multipart_upload(self, path: str, key: str, first: bytes, second: bytes, rest: Iterator[bytes]) -> None:
        """Upload a file in parts, several at once; it exists when the last request succeeds."""
        upload = {"Key": key, "UploadId": self._call("create_multipart_upload", Key=key)["UploadId"]}

        def send(number: int, body: bytes) -> Mapping[str, Any]:
            answer = self._call("upload_part", PartNumber=number, Body=body, **upload)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        sent: list[Mapping[str, Any]] = []
        pending: deque[Future[Mapping[str, Any]]] = deque()
        try:
            with ThreadPoolExecutor(_MAX_IN_FLIGHT, thread_name_prefix="danlu-upload") as pool:
                for number, body in enumerate(chain((first, second), rest), start=1):
                    if number > _MAX_PARTS:
                        raise ValueError(
                            f"{path} has more than {_MAX_PARTS} parts of {self._part_bytes} bytes; raise `part_bytes`"
                        )
                    pending.append(pool.submit(send, number, body))
                    if len(pending) >= _MAX_IN_FLIGHT:
                        sent.append(pending.popleft().result())
                sent += [future.result() for future in pending]
            self._call("complete_multipart_upload", MultipartUpload={"Parts": sent}, **upload)
        except BaseException as error:
            self._abort_upload(upload, error)
            raise

    def _abort_upload(self, upload: Mapping[str, str], error: BaseException) -> None:
        try:
            with self._translate_errors("ending the upload"):
                self._call("abort_multipart_upload", **upload)
        except OSError as second:
            error.add_note(f"and its parts may stay in the bucket until it aborts incomplete uploads: {second}")

    def _read_range(self, path: str, offset: int, length: int) -> bytes:
        with self._translate_errors(f"reading {path}"):
            try:
                location = f"{self._bucket}/{self._key(path)}"
                end = offset + length
                content: bytes = self._files.cat_file(location, start=offset, end=end, timeout=self._request_timeout)
            except OSError as error:
                if _error_code(error) not in ("InvalidRange", "416"):
                    raise
                content = b""
        if len(content) != length:
            raise short_read_error(self.name, path, offset, length, self.size(path))
        return content

    def _put_if_absent(self, key: str, data: bytes, path: str) -> bool:
        with self._translate_errors(f"creating {path}"):
            try:
                self._call("put_object", Key=key, Body=data, IfNoneMatch="*")
            except OSError as error:
                if isinstance(error, FileExistsError) or _error_code(error) in ("PreconditionFailed", "412"):
                    return False
                raise
        return True

    def _check_conditional_writes(self) -> None:
        """Check, once per store, that the server refuses to overwrite: one that ignores the header would."""
        with self._lock:
            if self._conditional_writes_ok:
                return
            key = f"{self._prefix}.danlu-probe-{secrets.token_hex(8)}"
            self._put_if_absent(key, b"", "a probe")
            refused = not self._put_if_absent(key, b"", "a probe")
            with self._translate_errors("removing a probe"):
                self._call("delete_object", Key=key)
            if not refused:
                raise OSError(
                    f"{self.name}: the server ignores If-None-Match and would overwrite a file that must be created "
                    "only once; use a server that supports conditional writes"
                )
            self._conditional_writes_ok = True

    @contextmanager
    def _translate_errors(self, doing: str) -> Iterator[None]:
        """Turn any client error into an OSError that names the operation."""
        from aiohttp import ClientError  # here, not above: only an s3:// store needs its client
        from botocore.exceptions import BotoCoreError, HTTPClientError
        from botocore.exceptions import ConnectionError as NoConnection

        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.name}: {doing}: not found ({error})") from error
        except PermissionError as error:
            raise PermissionError(f"{self.name}: {doing}: refused ({error})") from error
        except (TimeoutError, HTTPClientError, NoConnection, ClientError) as error:
            message = f"{self.name}: {doing}: no answer from the server ({error or type(error).__name__})"
            raise ConnectionError(message) from error
        except BotoCoreError as error:
            raise OSError(f"{self.name}: {doing}: {error}") from error
        except OSError as error:
            raise OSError(error.errno, f"{self.name}: {doing}: {error.strerror or error}") from error


def _chunks(parts: Iterable[Buffer], size: int) -> Iterator[bytes]:
    """The bytes of all parts, split again into chunks of `size`, the last one shorter."""
    gathered = bytearray()
    for part in parts:
        view = byte_view(part)
        while len(view):
            taken = min(size - len(gathered), len(view))
            gathered += view[:taken]
            view = view[taken:]
            if len(gathered) == size:
                yield bytes(gathered)
                gathered = bytearray()
    if gathered:
        yield bytes(gathered)


def _folder_ends(key: str) -> Iterator[int]:
    """Positions where the folders of a key end."""
    return (position for position, character in enumerate(key) if character == "/")


def _error_code(error: OSError) -> str:
    """The server's error code, if there is one."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _check_option_names(options: Mapping[str, str]) -> Mapping[str, str]:
    for name in options:
        if name not in DEFAULT_OPTIONS:
            close = get_close_matches(name, list(DEFAULT_OPTIONS), n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"one of: {', '.join(DEFAULT_OPTIONS)}"
            raise ValueError(f"`{name}` is no option of an s3:// store; {hint}")
    return options


def _parse_number(name: str, text: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value >= least:
        raise ValueError(f"`{name}` must be a number of {least} or more, but is {text!r} instead")
    return value


def _open_filesystem(options: Mapping[str, str]) -> Any:
    try:
        import s3fs
    except ImportError as error:
        raise ImportError("an s3:// store needs s3fs; install it with `pip install 'danlu[s3]'`") from error
    config = {name: _parse_number(name, options[name], 0.1) for name in ("connect_timeout", "read_timeout")}
    files = s3fs.S3FileSystem(
        endpoint_url=options["endpoint"] or None,
        client_kwargs={"region_name": options["region"]} if options["region"] else {},
        # One attempt: the caller that retries must know that the first one may have succeeded.
        config_kwargs={**config, "retries": {"total_max_attempts": 1}, "max_pool_connections": 4 * _MAX_IN_FLIGHT},
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    files.retries = 1
    return files
