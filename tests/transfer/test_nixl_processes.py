"""Tests of NIXL puts between processes that stop, stall, die and come back.

`default` is the transport that UCX picks on this machine, usually cross-memory attach. `tcp` is the transport
of pods without a fabric. Over TCP a write lands only while its target makes progress."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from baton.transfer.transfer_protocol import PutId, PutState, TransferError
from tests.transfer.puppet import Puppet

MIB = 1 << 20
SENDER, RECEIVER = 0xA, 0xB
PATIENCE_S = 30.0

MakePuppet = Callable[..., Puppet]


@pytest.fixture(params=["default", "tcp"])
def puppets(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakePuppet]:
    yield from _puppets({"UCX_TLS": "tcp"} if request.param == "tcp" else {}, tmp_path)


@pytest.fixture
def tcp_puppets(tmp_path: Path) -> Iterator[MakePuppet]:
    yield from _puppets({"UCX_TLS": "tcp"}, tmp_path)


def _puppets(environment: dict[str, str], folder: Path) -> Iterator[MakePuppet]:
    made: list[Puppet] = []

    def make(incarnation: int, length: int = MIB, agent: str | None = None) -> Puppet:
        made.append(Puppet(incarnation, agent, length, environment, folder / f"{len(made)}.txt"))
        return made[-1]

    yield make
    for puppet in made:
        puppet.kill()
    # Whatever dies: it is told by exceptions and states, not by a library on stderr.
    assert [puppet.said() for puppet in made] == [""] * len(made)


def pair(make: MakePuppet, length: int = MIB) -> tuple[Puppet, Puppet]:
    """Return a sender connected to a receiver, with the connection in use."""
    sender, receiver = make(SENDER, length), make(RECEIVER, length)
    sender.ask("connect", receiver.endpoint())
    assert finish(sender, put(sender, receiver, 64)) is PutState.DONE
    return sender, receiver


def put(sender: Puppet, receiver: Puppet, length: int) -> PutId:
    posted: PutId = sender.ask("put", receiver.incarnation, "kv", [(0, 0, length)])
    return posted


def finish(sender: Puppet, posted: PutId) -> PutState:
    give_up = time.monotonic() + PATIENCE_S
    while True:
        state: PutState = sender.ask("poll", posted)
        if state is not PutState.PENDING:
            return state
        assert time.monotonic() < give_up, "the put does not end"


def until(done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.001)


def test_bytes_cross_processes(puppets: MakePuppet) -> None:
    sender, receiver = pair(puppets, 4 * MIB)
    sender.ask("fill", 5)
    assert finish(sender, put(sender, receiver, 4 * MIB)) is PutState.DONE
    assert receiver.ask("count", 5) == 4 * MIB
    assert sender.end() == 0
    assert receiver.end() == 0


def test_a_frozen_target_gets_its_bytes_in_the_end(puppets: MakePuppet) -> None:
    sender, receiver = pair(puppets, 4 * MIB)
    sender.ask("fill", 5)
    receiver.freeze()
    posted = put(sender, receiver, 4 * MIB)
    receiver.thaw()
    assert finish(sender, posted) is PutState.DONE
    assert receiver.ask("count", 5) == 4 * MIB


def test_over_tcp_an_abandoned_put_stays_pending_and_lands_late(tcp_puppets: MakePuppet) -> None:
    sender, receiver = pair(tcp_puppets, 64 * MIB)
    sender.ask("fill", 5)
    receiver.ask("drive", False)
    posted = put(sender, receiver, 64 * MIB)
    for _ in range(1000):
        assert sender.ask("poll", posted) is PutState.PENDING
    sender.ask("disconnect", receiver.incarnation)
    assert not sender.ask("connected", receiver.incarnation)
    for _ in range(1000):
        assert sender.ask("poll", posted) is PutState.PENDING
    assert sender.ask("pending", receiver.incarnation) == 1
    assert receiver.ask("count", 5) < 64 * MIB
    receiver.ask("drive", True)
    assert finish(sender, posted) is PutState.DONE
    assert receiver.ask("count", 5) == 64 * MIB
    assert sender.ask("pending", receiver.incarnation) == 0
    sender.ask("connect", receiver.endpoint())
    assert finish(sender, put(sender, receiver, 64)) is PutState.DONE
    assert sender.end() == 0


def test_over_tcp_a_put_under_way_to_a_peer_that_dies_fails(tcp_puppets: MakePuppet) -> None:
    sender, receiver = pair(tcp_puppets, 64 * MIB)
    receiver.ask("drive", False)
    posted = put(sender, receiver, 64 * MIB)
    assert sender.ask("poll", posted) is PutState.PENDING
    receiver.kill()
    assert finish(sender, posted) is PutState.FAILED
    assert sender.ask("pending", receiver.incarnation) == 0
    assert not sender.ask("connected", receiver.incarnation)
    assert sender.end() == 0


@pytest.mark.parametrize("length", [64, 4 * MIB, 256 * MIB], ids="{} bytes".format)
def test_a_peer_that_dies_while_it_is_written_to_ends_the_put(puppets: MakePuppet, length: int) -> None:
    sender, receiver = pair(puppets, length)
    sender.begin("put", receiver.incarnation, "kv", [(0, 0, length)])
    receiver.kill()
    # The kill races with the write: it may have been done, or ended, or not been posted at all.
    try:
        posted: PutId = sender.answer()
    except TransferError:
        pass
    else:
        finish(sender, posted)
    assert sender.ask("pending", receiver.incarnation) == 0
    assert sender.end() == 0


def test_everything_toward_a_dead_peer_fails_and_closing_is_clean(puppets: MakePuppet) -> None:
    sender, receiver = pair(puppets)
    receiver.kill()
    try:
        posted = put(sender, receiver, 64 * 1024)
    except TransferError:
        pass  # the kill was seen before
    else:
        assert finish(sender, posted) is PutState.FAILED
    with pytest.raises(TransferError, match="broke"):
        put(sender, receiver, 64)
    assert not sender.ask("connected", receiver.incarnation)
    sender.ask("disconnect", receiver.incarnation)
    # UCX aborts a process that closes with something still queued to a dead peer, unless it winds up first.
    assert sender.end() == 0


def test_closing_with_an_unseen_put_to_a_dead_peer_is_clean(puppets: MakePuppet) -> None:
    sender, receiver = pair(puppets)
    sender.ask("drive", False)
    receiver.kill()
    with suppress(TransferError):
        put(sender, receiver, 64 * 1024)
    assert sender.end() == 0


def test_connecting_to_a_process_that_died_never_hangs(puppets: MakePuppet) -> None:
    sender, receiver = puppets(SENDER), puppets(RECEIVER)
    endpoint = receiver.endpoint()
    receiver.kill()
    try:
        sender.ask("connect", endpoint)
        posted = put(sender, receiver, 64)
    except TransferError:
        pass
    else:
        assert finish(sender, posted) is PutState.FAILED
    assert sender.ask("pending", receiver.incarnation) == 0
    assert sender.end() == 0


def test_a_receiver_outlives_its_senders(puppets: MakePuppet) -> None:
    sender, receiver = pair(puppets, 4 * MIB)
    receiver.ask("connect", sender.endpoint())
    sender.begin("put", receiver.incarnation, "kv", [(0, 0, 4 * MIB)])
    sender.kill()
    second = puppets(0xC, 4 * MIB)
    second.ask("connect", receiver.endpoint())
    second.ask("fill", 9)
    assert finish(second, put(second, receiver, 4 * MIB)) is PutState.DONE
    assert receiver.ask("count", 9) == 4 * MIB
    assert receiver.end() == 0


def test_a_restarted_process_under_the_same_agent_name_is_served(puppets: MakePuppet) -> None:
    sender, old = puppets(SENDER), puppets(RECEIVER, agent="decode-0")
    sender.ask("connect", old.endpoint())
    assert finish(sender, put(sender, old, 64)) is PutState.DONE
    old.kill()
    new = puppets(0xC, agent="decode-0")
    with pytest.raises(TransferError, match="disconnect it first"):
        sender.ask("connect", new.endpoint())
    sender.ask("disconnect", old.incarnation)
    sender.ask("connect", new.endpoint())
    sender.ask("fill", 6)
    assert finish(sender, put(sender, new, MIB)) is PutState.DONE
    assert new.ask("count", 6) == MIB
    assert new.end() == 0


# ---- writes that come late, and how their target escapes them


def late_write(make: MakePuppet) -> tuple[Puppet, Puppet, PutId]:
    """Post a write of fives over TCP, stop its sender, and let its target make no progress."""
    sender, receiver = pair(make, 64 * MIB)
    sender.ask("fill", 5)
    receiver.ask("drive", False)
    runs = [(start, start, MIB // 8) for start in reversed(range(0, 64 * MIB, MIB // 8))]
    posted: PutId = sender.ask("put", receiver.incarnation, "kv", runs)
    assert sender.ask("poll", posted) is PutState.PENDING
    sender.freeze()
    return sender, receiver, posted


def test_over_tcp_memory_that_is_used_again_at_once_is_overwritten(tcp_puppets: MakePuppet) -> None:
    """A late write overwrites reused memory over TCP, which is why a fence is needed."""
    sender, receiver, posted = late_write(tcp_puppets)
    receiver.ask("fill", 1)
    receiver.ask("drive", True)
    sender.thaw()
    assert finish(sender, posted) is PutState.DONE
    assert receiver.ask("count", 5) == 64 * MIB


def test_over_tcp_nothing_lands_after_the_sender_was_killed(tcp_puppets: MakePuppet) -> None:
    sender, receiver, _ = late_write(tcp_puppets)
    sender.kill()
    receiver.ask("drive", True)
    until_at_rest(receiver)
    receiver.ask("fill", 1)
    until_at_rest(receiver)
    assert receiver.ask("count", 5) == 0


def test_over_tcp_nothing_lands_after_the_memory_was_taken_away(tcp_puppets: MakePuppet) -> None:
    sender, receiver, posted = late_write(tcp_puppets)
    receiver.ask("drive", True)
    receiver.revoke()
    receiver.ask("fill", 1)
    sender.thaw()
    assert finish(sender, posted) is PutState.FAILED
    assert receiver.ask("count", 1) == 64 * MIB
    sender.ask("connect", receiver.endpoint())
    assert finish(sender, put(sender, receiver, 100)) is PutState.DONE
    assert receiver.ask("count", 5) == 100


def test_over_tcp_releasing_a_handle_stops_nothing(tcp_puppets: MakePuppet) -> None:
    """This is why a handle is kept until the library reports the write's end, and why no abort releases
    one."""
    sender, receiver, _ = late_write(tcp_puppets)
    sender.thaw()
    sender.ask("release")
    receiver.ask("fill", 1)
    receiver.ask("drive", True)
    until(lambda: bool(receiver.ask("count", 5)))


def test_a_write_to_memory_that_was_taken_away_fails_or_lands_where_nobody_reads(
    puppets: MakePuppet,
) -> None:
    """The write is posted after the revocation, by a sender that has not seen it yet."""
    sender, receiver = pair(puppets, 4 * MIB)
    sender.ask("fill", 5)
    sender.ask("drive", False)
    old = receiver.endpoint().incarnation
    receiver.revoke()
    receiver.ask("fill", 1)
    posted: PutId = sender.ask("put", old, "kv", [(0, 0, 4 * MIB)])
    state = finish(sender, posted)
    assert receiver.ask("count", 1) == 4 * MIB
    # One that fails may have landed first: by address a write is there before its way is seen to be broken.
    assert receiver.ask("count_in_sinks", 5) == 4 * MIB or state is not PutState.DONE
    finish_broken(sender, old)
    assert sender.ask("pending", old) == 0
    sender.ask("connect", receiver.endpoint())
    assert finish(sender, put(sender, receiver, 100)) is PutState.DONE
    assert receiver.ask("count", 5) == 100


def finish_broken(sender: Puppet, old: int) -> None:
    """Send puts until the sender has seen that its connection broke."""
    sender.ask("drive", True)

    def broken() -> bool:
        with suppress(TransferError):
            finish(sender, sender.ask("put", old, "kv", [(0, 0, 64)]))
        return not sender.ask("connected", old)

    until(broken)


def until_at_rest(receiver: Puppet) -> None:
    """Wait until all writes on their way to a dead sender's target have arrived or never will."""
    for _ in range(200):
        receiver.ask("progress")
        time.sleep(0.001)
