"""A rendezvous store with certificates: what passes the wire, and who is refused."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from certificates import make_certificates
from pydantic import ValidationError
from store_fuzz import GENERATION, TIMEOUT, TOKEN

from danlu.comm.store_client import LastingStoreClient, StoreError
from danlu.comm.store_server import StoreServer
from danlu.comm.store_tls import server_context
from danlu.comm.store_token import StoreTokenError
from danlu.comm.token_store import TokenStore
from danlu.spec.resilience import TlsFiles

SHORT = timedelta(seconds=3)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_certificates(tmp_path_factory.mktemp("ours") / "tls")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return make_certificates(tmp_path_factory.mktemp("theirs") / "tls")


def serve(tls: TlsFiles | None, port: int = 0) -> StoreServer:
    return StoreServer(socket.create_server(("127.0.0.1", port), backlog=128), TOKEN, GENERATION, tls)


@pytest.fixture
def server(ours: TlsFiles) -> Iterator[StoreServer]:
    made = serve(ours)
    yield made
    made.close()


class Wire:
    """Passes on what a client and a server say, and keeps it."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.heard = bytearray()
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, args=((host, int(port)),), daemon=True).start()

    def _accept(self, place: tuple[str, int]) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(place)
        self._ends += (client, server)
        for one, other in ((client, server), (server, client)):
            threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def close(self) -> None:
        for end in (*self._ends, self._listener):
            end.close()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while some := one.recv(1 << 16):
                self.heard += some
                other.sendall(some)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_listener_on_the_wire_reads_nothing_of_what_is_encrypted(ours: TlsFiles, encrypted: bool) -> None:
    tls = ours if encrypted else None
    server = serve(tls)
    wire = Wire(server.address)
    one = TokenStore(wire.address, TOKEN, GENERATION, TIMEOUT, tls=tls)
    one.set("address", "where rank 7 listens")
    assert one.get("address") == b"where rank 7 listens"
    assert (b"where rank 7 listens" in wire.heard) != encrypted
    if encrypted:
        another = TokenStore(server.address, TOKEN, GENERATION, TIMEOUT, tls=tls)
        assert another.clone().get("address") == b"where rank 7 listens"
    one.close()
    wire.close()
    server.close()


def test_a_certificate_of_another_authority_is_refused_at_once(server: StoreServer, theirs: TlsFiles) -> None:
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"must accept the certificate of `resilience.tls`"):
        TokenStore(server.address, TOKEN, GENERATION, TIMEOUT, tls=theirs)
    assert time.monotonic() - began < 10


def test_who_trusts_the_server_but_has_no_certificate_of_its_authority_is_refused(
    server: StoreServer, ours: TlsFiles, theirs: TlsFiles
) -> None:
    mixed = theirs.model_copy(update={"authority": ours.authority})
    with pytest.raises(StoreError):
        TokenStore(server.address, TOKEN, GENERATION, SHORT, tls=mixed)


def test_who_comes_without_certificates_is_refused_and_changes_nothing(server: StoreServer, ours: TlsFiles) -> None:
    with pytest.raises(StoreError):
        TokenStore(server.address, TOKEN, GENERATION, SHORT)
    host, _, port = server.address.rpartition(":")
    for number in range(20):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(bytes([number]) * 10 ** number.bit_length())
    one = TokenStore(server.address, TOKEN, GENERATION, TIMEOUT, tls=ours)
    assert one.num_keys() == 0


def test_a_certificate_does_not_replace_the_token(server: StoreServer, ours: TlsFiles) -> None:
    with pytest.raises(StoreError, match="is not this job's store"):
        TokenStore(server.address, bytes(32), GENERATION, SHORT, tls=ours)


def test_a_server_without_certificates_is_not_talked_to(ours: TlsFiles) -> None:
    plain = serve(None)
    with pytest.raises(StoreError):
        TokenStore(plain.address, TOKEN, GENERATION, SHORT, tls=ours)
    plain.close()


def test_who_lasts_connects_again_encrypted(ours: TlsFiles) -> None:
    first = StoreServer(socket.create_server(("127.0.0.1", 0)), TOKEN, 0, ours)
    lasting = LastingStoreClient(first.address, TOKEN, 5.0, silence=5.0, absence=20.0, tls=ours)
    lasting.set("order", "1")
    port = int(first.address.rpartition(":")[2])
    first.close()
    second = StoreServer(socket.create_server(("127.0.0.1", port), backlog=128), TOKEN, 0, ours)
    lasting.set("order", "2")
    assert lasting.get("order") == b"2"
    lasting.close()
    second.close()


def test_files_that_cannot_be_used_are_named(ours: TlsFiles, theirs: TlsFiles, tmp_path: Path) -> None:
    for wrong in ({"key": theirs.key}, {"certificate": str(tmp_path / "none.pem")}, {"authority": ours.key}):
        with pytest.raises(StoreTokenError, match=r"`resilience.tls` must name a certificate \(/.*\), its key"):
            server_context(ours.model_copy(update=wrong))
    with pytest.raises(ValidationError, match="must be an absolute path"):
        TlsFiles(certificate="host.pem", key="/host.key", authority="/authority.pem")
