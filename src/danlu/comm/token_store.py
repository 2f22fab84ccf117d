"""A rendezvous store for ranks of several hosts, which only holders of the job's token can use: torch's `Store`."""

from datetime import timedelta

from danlu.comm.store_client import StoreClient, StoreError
from danlu.comm.store_server import Request, StoreServer
from danlu.spec.resilience import TlsFiles
from danlu.torch_compat import Store


class TokenStore(Store):
    """Keys that a `StoreServer` at `endpoint` keeps; raises `StoreError` when it cannot be reached or refuses.

    Torch does not keep a store that is written in Python: whoever gives it away must keep it for as long.
    """

    def __init__(
        self,
        endpoint: str,
        token: bytes,
        generation: int,
        timeout: timedelta,
        server: StoreServer | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        """Connect, and try again until the server is there or the time is over; a server of this process is kept."""
        super().__init__()
        self._timeout = timeout
        self.endpoint, self.generation = endpoint, generation
        self._token, self._server, self._tls = token, server, tls
        self._clones: list[TokenStore] = []
        self._client = StoreClient(endpoint, token, generation, timeout.total_seconds(), tls=tls)

    def clone(self) -> "TokenStore":
        """The same keys over a connection of its own."""
        self._clones.append(TokenStore(self.endpoint, self._token, self.generation, self._timeout, tls=self._tls))
        return self._clones[-1]

    def close(self) -> None:
        """Leave the store, and end its server if it is of this process."""
        if hasattr(self, "_client"):
            self._client.close()
        if self._server is not None:
            self._server.close()

    def __del__(self) -> None:
        self.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._client.set(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._client.ask(Request.APPEND, key, value)

    def get(self, key: str) -> bytes:
        """The value of a key, which is waited for."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of several keys, which are waited for."""
        if (found := self._client.read(keys, self._timeout.total_seconds())) is None:
            raise self._missing(keys, self._timeout.total_seconds())
        return found

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        """Add to a number, which begins at 0; its new value."""
        return int(self._one(Request.ADD, key, str(value)))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key that has the expected value, or has none if that is empty; the value it has then."""
        return self._one(Request.COMPARE_SET, key, expected_value, desired_value)

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys are set."""
        return self._one(Request.CHECK, *keys) == b"1"

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether there was one."""
        return self._one(Request.DELETE, key) == b"1"

    def num_keys(self) -> int:
        """Number of keys."""
        return int(self._one(Request.COUNT))

    def has_extended_api(self) -> bool:
        """`append`, `multi_get` and `multi_set` exist."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait."""
        super().set_timeout(timeout)
        self._timeout = timeout

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set."""
        allowed = (self._timeout if timeout is None else timeout).total_seconds()
        if not self._client.wait(keys, allowed):
            raise self._missing(keys, allowed)

    def _missing(self, keys: list[str], seconds: float) -> StoreError:
        shown = ", ".join(keys[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
        return StoreError(f"{shown} must be set within {seconds:.0f} s, but no rank has set it")

    def _one(self, request: Request, *fields: str | bytes) -> bytes:
        found = self._client.ask(request, *fields)
        assert found, request
        return found[0]
