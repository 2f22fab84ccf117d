"""A store in an S3 bucket, by s3fs: large files in parts, small ones in one request, commits only if absent."""

import secrets
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Self

from danlu.storage.store_path import Buffer, plain, safe, shortage

OPTIONS = {
    "endpoint": "",
    "region": "",
    "part_bytes": str(64 << 20),
    "connect_timeout": "5",
    "read_timeout": "30",
    "request_timeout": "300",
}
"""What may be set, and what it is otherwise."""

_SMALLEST_PART = 5 << 20  # S3 takes no smaller one, the last excepted
_MOST_PARTS = 10_000
_IN_FLIGHT = 4
_KEYS_A_REMOVAL = 1000  # S3 takes no more


class ObjectStore:
    """Files as objects under a prefix of a bucket, which must exist.

    An object appears whole when its upload is completed, so a name is never half there. Nothing is tried twice and
    every request ends: a server that dies gives a ConnectionError after `connect_timeout` or `read_timeout` seconds,
    one that is silent after `request_timeout` (a client may wait for leave to send, where no other clock runs). What
    an interrupted upload leaves is invisible and paid for: give the bucket a rule that ends incomplete uploads.
    """

    def __init__(self, files: Any, bucket: str, prefix: str, part_bytes: int, request_timeout: float) -> None:
        """`files` is an `s3fs.S3FileSystem`; use `at` to have one made."""
        self._files = files
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._part_bytes = part_bytes
        self._request_timeout = request_timeout
        self._exclusive = False
        self._lock = threading.Lock()
        self.name = f"s3://{bucket}/{prefix}".rstrip("/")

    @classmethod
    def at(cls, place: str, options: Mapping[str, str]) -> Self:
        """The store at `bucket/prefix`, with `options` as `open_store` describes them."""
        bucket, _, prefix = place.partition("/")
        prefix = prefix.rstrip("/")
        if not bucket:
            raise ValueError(f"s3://{place} must name a bucket: s3://bucket/prefix")
        if prefix:
            safe(prefix)
        chosen = {**OPTIONS, **_known(options)}
        part_bytes = int(_number("part_bytes", chosen["part_bytes"], _SMALLEST_PART))
        request_timeout = _number("request_timeout", chosen["request_timeout"], 0.1)
        return cls(_connected(chosen), bucket, prefix, part_bytes, request_timeout)

    def write(self, path: str, parts: Iterable[Buffer]) -> None:
        """Make or replace a file."""
        key = self._key(path)
        chunks = _chunks(parts, self._part_bytes)
        first = next(chunks, b"")
        second = next(chunks, None)
        with self._errors(f"writing {path}"):
            if second is None:
                self._call("put_object", Key=key, Body=first)
            else:
                self._upload(path, key, first, second, chunks)

    def create(self, path: str, data: Buffer) -> None:
        """Make a file if there is none; FileExistsError otherwise. Needs a server that knows If-None-Match."""
        key = self._key(path)
        self._prove_exclusive()
        if not self._put_if_absent(key, bytes(plain(data)), path):
            raise FileExistsError(f"{self.name}: {path} is already there")

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file from `offset`."""
        wanted = max(0, self.size(path) - offset) if length is None else length
        if not wanted:
            if offset > (size := self.size(path)):
                raise shortage(self.name, path, offset, wanted, size)
            return b""
        return self._range(path, offset, wanted)

    def read_into(self, path: str, offset: int, into: memoryview) -> None:
        """Fill `into` from `offset`, in ranges that are fetched at once."""
        target = plain(into)
        if not len(target):
            self.read(path, offset, 0)
            return

        def fetch(start: int) -> None:
            piece = target[start : start + self._part_bytes]
            piece[:] = self._range(path, offset + start, len(piece))

        with ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="danlu-fetch") as pool:
            deque(pool.map(fetch, range(0, len(target), self._part_bytes)), maxlen=0)

    def size(self, path: str) -> int:
        """Bytes in a file."""
        with self._errors(f"looking for {path}"):
            return int(self._call("head_object", Key=self._key(path))["ContentLength"])

    def list(self, folder: str = "") -> list[str]:
        """Names directly inside a folder."""
        start = f"{self._key(folder)}/" if folder else self._prefix
        names: set[str] = set()
        with self._errors(f"listing {folder or 'all'}"):
            for page in self._pages(Prefix=start, Delimiter="/"):
                found = [item["Key"] for item in page.get("Contents", ())]
                found += [item["Prefix"] for item in page.get("CommonPrefixes", ())]
                names.update(key[len(start) :].rstrip("/") for key in found)
        return sorted(names - {""})

    def remove(self, path: str) -> None:
        """Take away a file or a folder."""
        key = self._key(path)
        with self._errors(f"removing {path}"):
            self._call("delete_object", Key=key)
            inside = [item["Key"] for page in self._pages(Prefix=f"{key}/") for item in page.get("Contents", ())]
            # Some servers keep a folder as a thing of its own, and list it when it is empty.
            folders = {f"{name[:end]}/" for name in inside for end in _ends(name) if end >= len(key)}
            self._delete([*inside, *sorted(folders, key=len, reverse=True)])

    def sweep(self, folder: str, keep: str) -> None:
        """Take away the objects in a folder that do not begin with `keep`."""
        for name in self.list(folder):
            if not name.startswith(keep):
                self.remove(f"{folder}/{name}")

    def free(self) -> int | None:
        """Not told: a bucket has no end, and a quota is not in the protocol."""
        return None

    def _key(self, path: str) -> str:
        return self._prefix + safe(path)

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._files.call_s3(method, timeout=self._request_timeout, Bucket=self._bucket, **arguments)

    def _delete(self, keys: Sequence[str]) -> None:
        for begin in range(0, len(keys), _KEYS_A_REMOVAL):
            doomed = [{"Key": key} for key in keys[begin : begin + _KEYS_A_REMOVAL]]
            answer = self._call("delete_objects", Delete={"Objects": doomed, "Quiet": True})
            if left := answer.get("Errors"):
                raise OSError(f"{len(left)} files stay, the first is {left[0]['Key']}: {left[0].get('Message')}")

    def _pages(self, **arguments: Any) -> Iterator[Mapping[str, Any]]:
        following: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", **arguments, **following)
            yield page
            if not page.get("IsTruncated"):
                return
            following = {"ContinuationToken": page["NextContinuationToken"]}

    def _upload(self, path: str, key: str, first: bytes, second: bytes, rest: Iterator[bytes]) -> None:
        """Send a file in parts, several at once; it is there when the last request says so."""
        upload = {"Key": key, "UploadId": self._call("create_multipart_upload", Key=key)["UploadId"]}

        def send(number: int, body: bytes) -> Mapping[str, Any]:
            answer = self._call("upload_part", PartNumber=number, Body=body, **upload)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        sent: list[Mapping[str, Any]] = []
        pending: deque[Future[Mapping[str, Any]]] = deque()
        try:
            with ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="danlu-upload") as pool:
                for number, body in enumerate(_three(first, second, rest), start=1):
                    if number > _MOST_PARTS:
                        raise ValueError(
                            f"{path} has more than {_MOST_PARTS} parts of {self._part_bytes} bytes; raise `part_bytes`"
                        )
                    pending.append(pool.submit(send, number, body))
                    if len(pending) >= _IN_FLIGHT:
                        sent.append(pending.popleft().result())
                sent += [future.result() for future in pending]
            self._call("complete_multipart_upload", MultipartUpload={"Parts": sent}, **upload)
        except BaseException as error:
            self._abandon(upload, error)
            raise

    def _abandon(self, upload: Mapping[str, str], error: BaseException) -> None:
        try:
            with self._errors("ending the upload"):
                self._call("abort_multipart_upload", **upload)
        except OSError as second:
            error.add_note(f"and its parts may stay in the bucket until it ends incomplete uploads: {second}")

    def _range(self, path: str, offset: int, length: int) -> bytes:
        with self._errors(f"reading {path}"):
            try:
                place = f"{self._bucket}/{self._key(path)}"
                end = offset + length
                content: bytes = self._files.cat_file(place, start=offset, end=end, timeout=self._request_timeout)
            except OSError as error:
                if _code(error) not in ("InvalidRange", "416"):
                    raise
                content = b""
        if len(content) != length:
            raise shortage(self.name, path, offset, length, self.size(path))
        return content

    def _put_if_absent(self, key: str, data: bytes, path: str) -> bool:
        with self._errors(f"creating {path}"):
            try:
                self._call("put_object", Key=key, Body=data, IfNoneMatch="*")
            except OSError as error:
                if isinstance(error, FileExistsError) or _code(error) in ("PreconditionFailed", "412"):
                    return False
                raise
        return True

    def _prove_exclusive(self) -> None:
        """Once a store, see that the server refuses what is there: one that ignores the header would overwrite it."""
        with self._lock:
            if self._exclusive:
                return
            key = f"{self._prefix}.danlu-probe-{secrets.token_hex(8)}"
            self._put_if_absent(key, b"", "a probe")
            refused = not self._put_if_absent(key, b"", "a probe")
            with self._errors("removing a probe"):
                self._call("delete_object", Key=key)
            if not refused:
                raise OSError(
                    f"{self.name}: the server ignores If-None-Match and would overwrite a file that must be made once; "
                    "use a server that has conditional writes"
                )
            self._exclusive = True

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Whatever the client raises, as an OSError that says what was being done."""
        from aiohttp import ClientError  # here, not above: only who opens an s3:// store needs its client
        from botocore.exceptions import BotoCoreError, HTTPClientError
        from botocore.exceptions import ConnectionError as NoConnection

        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.name}: {doing}: not there ({error})") from error
        except PermissionError as error:
            raise PermissionError(f"{self.name}: {doing}: refused ({error})") from error
        except (TimeoutError, HTTPClientError, NoConnection, ClientError) as error:
            message = f"{self.name}: {doing}: no answer from the server ({error or type(error).__name__})"
            raise ConnectionError(message) from error
        except BotoCoreError as error:
            raise OSError(f"{self.name}: {doing}: {error}") from error
        except OSError as error:
            raise OSError(error.errno, f"{self.name}: {doing}: {error.strerror or error}") from error


def _three(first: bytes, second: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield second
    yield from rest


def _chunks(parts: Iterable[Buffer], size: int) -> Iterator[bytes]:
    """The bytes of all parts, cut anew into pieces of `size`, the last one shorter."""
    gathered = bytearray()
    for part in parts:
        view = plain(part)
        while len(view):
            taken = min(size - len(gathered), len(view))
            gathered += view[:taken]
            view = view[taken:]
            if len(gathered) == size:
                yield bytes(gathered)
                gathered = bytearray()
    if gathered:
        yield bytes(gathered)


def _ends(key: str) -> Iterator[int]:
    """Where the folders of a key end."""
    return (place for place, character in enumerate(key) if character == "/")


def _code(error: OSError) -> str:
    """The server's own word for an error, where there is one."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _known(options: Mapping[str, str]) -> Mapping[str, str]:
    for name in options:
        if name not in OPTIONS:
            close = get_close_matches(name, list(OPTIONS), n=1)
            hint = f"did you mean `{close[0]}`?" if close else f"one of: {', '.join(OPTIONS)}"
            raise ValueError(f"`{name}` is no option of an s3:// store; {hint}")
    return options


def _number(name: str, text: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value >= least:
        raise ValueError(f"`{name}` must be a number of {least} or more, but is {text!r} instead")
    return value


def _connected(options: Mapping[str, str]) -> Any:
    try:
        import s3fs
    except ImportError as error:
        raise ImportError("an s3:// store needs s3fs; install it with `pip install 'danlu[s3]'`") from error
    config = {name: _number(name, options[name], 0.1) for name in ("connect_timeout", "read_timeout")}
    files = s3fs.S3FileSystem(
        endpoint_url=options["endpoint"] or None,
        client_kwargs={"region_name": options["region"]} if options["region"] else {},
        # One attempt: whoever tries again must know that the first one may have come through.
        config_kwargs={**config, "retries": {"total_max_attempts": 1}, "max_pool_connections": 4 * _IN_FLIGHT},
        use_listings_cache=False,
        skip_instance_cache=True,
    )
    files.retries = 1
    return files
