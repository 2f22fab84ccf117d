"""The rendezvous store of several hosts: what torch expects of a store, and who may not use it."""

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_fuzz import GENERATION, TIMEOUT, TOKEN, Strangers, new_server, unharmed
from torch.distributed import PrefixStore

from danlu.comm.store_channel import ChannelError, decode_fields, encode_fields
from danlu.comm.store_client import StoreError
from danlu.comm.store_server import Request, StoreServer
from danlu.comm.store_token import StoreTokenError, make_token, read_token
from danlu.comm.token_store import TokenStore

SHORT = timedelta(seconds=0.3)


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = new_server()
    yield server
    server.close()


def client(server: StoreServer, generation: int = GENERATION) -> TokenStore:
    return TokenStore(server.address, TOKEN, generation, TIMEOUT)


def test_it_is_a_store_as_torch_knows_them(server: StoreServer) -> None:
    one, two = client(server), PrefixStore("a", PrefixStore("b", kept := client(server)))
    two.set("key", b"\0value\xff")
    assert one.get("b/a/key") == b"\0value\xff"
    assert [two.add("count", 5), two.add("count", -7)] == [5, -2]
    assert two.check(["key", "count"]) and not two.check(["key", "other"])
    assert one.compare_set("c", "", "first") == b"first"
    assert one.compare_set("c", "wrong", "second") == b"first"
    assert one.compare_set("c", "first", "second") == b"second"
    assert one.compare_set("absent", "expected", "desired") == b"expected"
    one.append("c", "!")
    assert one.multi_get(["c", "b/a/count"]) == [b"second!", b"-2"]
    assert one.num_keys() == 3
    assert one.delete_key("c") and not one.delete_key("c")
    assert one.clone().num_keys() == kept.num_keys() == 2


def test_a_key_is_waited_for(server: StoreServer) -> None:
    one, two = client(server), client(server)
    threading.Timer(0.2, lambda: two.set("late", "here")).start()
    began = time.monotonic()
    assert one.get("late") == b"here"
    assert 0.1 < time.monotonic() - began < 5
    with pytest.raises(StoreError, match="never must be set within 0 s, but no rank has set it"):
        one.wait(["late", "never"], SHORT)


def test_many_keys_are_read_in_few_requests(server: StoreServer) -> None:
    """As every rank reads the addresses of all others; as many values as fit come in one answer."""
    one = client(server)
    keys = [f"rank {number}" for number in range(50)]
    for number, key in enumerate(keys):
        one.set(key, bytes([number]) * 100_000)
    asked: list[Request] = []
    ask = one._client.ask

    def counted(request: Request, *fields: str | bytes) -> list[bytes] | None:
        asked.append(request)
        return ask(request, *fields)

    one._client.ask = counted  # type: ignore[method-assign]
    assert one.multi_get(keys) == [bytes([number]) * 100_000 for number in range(50)]
    assert asked == [Request.READ] * 5
    one.set_timeout(SHORT)
    with pytest.raises(StoreError, match="rank 0, never must be set within 0 s"):
        one.multi_get(["rank 0", "never"])


def test_a_thread_that_waits_does_not_keep_the_others_from_the_store(server: StoreServer) -> None:
    store = client(server)
    waits = threading.Thread(target=store.wait, args=(["set by another thread"],))
    waits.start()
    time.sleep(0.1)
    store.set("set by another thread", "")
    waits.join(10)
    assert not waits.is_alive()


def test_who_does_not_know_the_token_is_told_and_nothing_is_changed(server: StoreServer) -> None:
    with pytest.raises(StoreError, match="is not this job's store: the server does not know the token of this job"):
        TokenStore(server.address, bytes(32), GENERATION, TIMEOUT)


def test_a_generation_that_is_over_can_neither_join_nor_write(server: StoreServer) -> None:
    early = client(server)
    early.set("key", "old")
    server.advance(GENERATION + 1)
    with pytest.raises(StoreError):
        early.set("key", "late")
    with pytest.raises(StoreError, match=f"generation {GENERATION} of this run is over"):
        client(server)
    late = client(server, GENERATION + 1)
    assert late.num_keys() == 0
    server.advance(GENERATION)
    assert server.generation == GENERATION + 1, "it never goes back"


def test_a_rank_that_is_early_waits_for_the_new_generation(server: StoreServer) -> None:
    threading.Timer(0.3, lambda: server.advance(GENERATION + 1)).start()
    assert client(server, GENERATION + 1).num_keys() == 0


def test_a_store_that_is_not_there(server: StoreServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(StoreError, match=r"must be reached within 0 s, but: .*refused"):
        TokenStore(place, TOKEN, GENERATION, SHORT)


def test_it_never_holds_more_than_it_may(server: StoreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danlu.comm.store_keys.MAX_TOTAL_BYTES", 100)
    store = client(server)
    store.set("key", bytes(90))
    store.set("key", bytes(95))
    with pytest.raises(StoreError, match="the store is full: 1 keys, 98 bytes"):
        store.set("other", "more")
    monkeypatch.undo()
    for _ in range(2):
        store.append("grows", bytes(1 << 19)[16:])
    with pytest.raises(StoreError, match="a value must have at most 1,048,560 bytes, but has 1,048,561"):
        store.append("grows", bytes(17))
    assert len(store.get("grows")) == (1 << 20) - 32
    with pytest.raises(StoreError, match="at most 1,048,576 bytes"):
        store.set("key", bytes(2 << 20))


def test_strangers_change_nothing_and_crash_nothing(server: StoreServer) -> None:
    client(server).set("kept", "as it was")
    strangers = Strangers(server)
    while strangers.sent < 1000:
        strangers.attack()
    assert strangers.granted == 0
    assert unharmed(server)


@given(st.binary(max_size=60))
def test_any_bytes_are_fields_or_refused(body: bytes) -> None:
    try:
        code, fields = decode_fields(body)
    except ChannelError:
        return
    assert encode_fields(code, *fields) == body


def test_a_token_is_of_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "a" / "token"
    makers = [threading.Thread(target=make_token, args=(path,)) for _ in range(8)]
    for each in makers:
        each.start()
    for each in makers:
        each.join()
    token = read_token(path)
    make_token(path)
    assert read_token(path) == token and len(token) == 32
    assert [file.name for file in path.parent.iterdir()] == ["token"]
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(StoreTokenError, match="but its mode is 640: others may know the token"):
        read_token(path)
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(StoreTokenError, match="must have 64 hexadecimal digits"):
        read_token(path)
    with pytest.raises(StoreTokenError, match="must have the token of the store, but: No such file"):
        read_token(tmp_path / "none")
