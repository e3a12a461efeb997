"""Both ends of the control plane: what is sent, what waits, what is sent again, who may speak."""

import contextlib
import os
import stat

import msgpack
import pytest
import zmq

from jax_specdec import control
from jax_specdec.control import ControlClient, ControlServer, Heartbeat, Phase, ProcessStats
from jax_specdec.engine.work_directory import WorkDirectory
from tests.support.processes import wait_for


@pytest.fixture
def listening(tmp_path):
    with contextlib.closing(ControlServer(folder=tmp_path)) as made:
        yield made


@pytest.fixture
def peer_of():
    """Makes a process's end of a link, by hand; all of them close with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *names: stack.enter_context(contextlib.closing(Peer(*names)))


class Peer:
    """A process's end of a link, by hand: it takes what it likes and says what it likes."""

    def __init__(self, connection, identity=None):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt_string(zmq.IDENTITY, identity or connection.identity)
        self.socket.connect(connection.address)

    def say(self, taken=0, **values):
        self.socket.send(Heartbeat(taken=taken, **values).to_bytes())

    def take(self):
        """The numbers and payloads of the commands that are here by now."""
        found = []
        while self.socket.poll(0 if found else 5000):
            number, payload = self.socket.recv_multipart()
            found.append((int.from_bytes(number, "little"), payload))
        return found

    def take_all(self, count, meanwhile=lambda: None):
        found = []
        while len(found) < count:
            found += self.take()
            meanwhile()
        return found

    def nothing_comes(self):
        return not self.socket.poll(200)

    def close(self):
        self.socket.close()
        self.context.term()


def until(listening, condition):
    """Pump until something holds."""
    wait_for(lambda: (listening.pump(), condition())[1])


def hear(listening, link, peer, **said):
    beats = link.heartbeat.beats
    peer.say(**said)
    until(listening, lambda: link.heartbeat.beats > beats)


@pytest.fixture
def connected(listening, peer_of):
    """A link and the peer at its other end, which was heard."""
    link = listening.link()
    peer = peer_of(link.connection)
    hear(listening, link, peer)
    return listening, link, peer


def test_lost_commands_are_sent_again_until_acknowledged(connected):
    """A connection that broke lost what was under way: the peer says what it has."""
    listening, link, peer = connected
    for n in range(4):
        link.tell(b"%d" % n)
    lost = peer.take_all(4)
    hear(listening, link, peer, taken=1, missing=True)
    assert list(link.unacknowledged) == [b"1", b"2", b"3"]
    assert peer.take_all(3) == lost[1:]
    hear(listening, link, peer, taken=4)  # nothing is missing: nothing comes
    assert not link.unacknowledged
    assert peer.nothing_comes()


def test_a_last_command_that_got_lost_is_sent_again_too(connected, monkeypatch):
    """No later one shows that it is missing; a heartbeat that lacks it after a second does."""
    listening, link, peer = connected
    link.tell(b"last")
    assert peer.take() == [(1, b"last")]
    hear(listening, link, peer, taken=0)  # it may be under way
    assert peer.nothing_comes()
    monkeypatch.setattr(control.channel, "RESEND_SECONDS", 0.0)
    hear(listening, link, peer, taken=0)
    assert peer.take() == [(1, b"last")]


def test_a_peer_that_reads_nothing_holds_nobody_up(connected, peer_of):
    """Far more than the sockets hold is told at once; all of it arrives once it is read."""
    listening, link, peer = connected
    other = listening.link()
    payload = b"x" * 10_000
    for _ in range(4000):
        link.tell(payload)
    assert link.num_sent < link.numbered == 4000  # the socket was full, and no call has waited
    free = peer_of(other.connection)
    hear(listening, other, free)
    other.tell(b"for another")
    assert free.take() == [(1, b"for another")]
    found = peer.take_all(4000, meanwhile=listening.pump)
    assert [number for number, _ in found] == [*range(1, 4001)]


@pytest.mark.parametrize(
    "said", [b"", b"\xc1", b"\x90", Heartbeat(taken=7).to_bytes(), Heartbeat().to_bytes()[:-1]]
)
def test_what_is_no_heartbeat_of_this_link_is_dropped(connected, said):
    """Garbage, and one that says it took commands that it was never told."""
    listening, link, peer = connected
    before = link.heartbeat
    peer.socket.send(said)
    peer.socket.send_multipart([Heartbeat().to_bytes(), b"more"])
    hear(listening, link, peer, phase=Phase.IDLE)
    assert (link.heartbeat.beats, link.heartbeat.phase) == (before.beats + 1, Phase.IDLE)


ODD = (None, True, -1, 5, 2**63, 1.5, "", "idle", b"idle", [], [""], [5], [["idle"]], {}, {1: 2},
       msgpack.ExtType(5, b"x"))  # fmt: skip


def test_a_heartbeat_of_any_values_is_a_pulse_or_refused():
    whole = msgpack.unpackb(Heartbeat(phase=Phase.IDLE).to_bytes())
    for place in range(len(whole)):
        taken = 0
        for odd in ODD:
            data = msgpack.packb([*whole[:place], odd, *whole[place + 1 :]])
            with contextlib.suppress(ValueError):
                str(Heartbeat.from_bytes(data, 1))
                taken += 1
        assert taken


def test_a_heartbeat_that_is_too_long_is_ignored(connected):
    listening, link, peer = connected
    peer.say(phase=Phase.IDLE, devices=("x" * control.channel.MAX_BEAT_BYTES,))
    hear(listening, link, peer, phase=Phase.STEPPING)
    assert link.heartbeat.phase is Phase.STEPPING
    assert link.heartbeat.beats == 2  # the first one, and the last: it has connected again
    hear(listening, link, peer, devices=("x" * (control.channel.MAX_BEAT_BYTES // 2),))
    assert link.heartbeat.beats == 3
    link.tell(b"all is well")
    until(listening, lambda: link.num_sent == 1)
    assert peer.take() == [(1, b"all is well")]


def test_a_flood_of_heartbeats_holds_nobody_up(connected):
    listening, _, peer = connected
    beat, heard = Heartbeat().to_bytes(), []
    hear_one = listening.hear

    def flooded(*parts):
        heard.append(parts)
        peer.socket.send(beat)  # there is always one more
        hear_one(*parts)

    listening.hear = flooded
    for _ in range(100):
        peer.socket.send(beat)
    wait_for(listening.ready)
    listening.pump()
    assert 0 < len(heard) <= control.channel.HEARD_AT_ONCE


def test_a_stranger_is_not_heard_and_gets_nothing(connected, peer_of):
    listening, link, peer = connected
    stranger = peer_of(link.connection, "0" * 32)
    stranger.say(phase=Phase.IDLE)
    link.tell(b"secret")
    hear(listening, link, peer)
    assert link.heartbeat.phase is Phase.STARTING
    assert stranger.nothing_comes()
    assert peer.take() == [(1, b"secret")]


def test_over_tcp_a_process_without_the_key_is_not_heard(peer_of):
    with contextlib.closing(ControlServer("tcp://127.0.0.1:*")) as listening:
        link = listening.link()
        assert link.connection.address.startswith("tcp://127.0.0.1:")
        assert len(link.connection.server_key) == 40
        plain = peer_of(link.connection)  # it knows the name, and speaks without encryption
        plain.say()
        client = ControlClient(link.connection, ProcessStats())
        client.start()
        link.tell(control.to_bytes(control.Shutdown()))
        until(listening, lambda: link.heartbeat.taken)
        assert client.commands.get(timeout=5) == control.Shutdown()
        assert plain.nothing_comes()
        assert link.heartbeat.phase is Phase.IMPORTING  # the plain one said STARTING


def test_a_client_takes_commands_once_and_asks_for_gaps(listening):
    link = listening.link()
    client = ControlClient(link.connection, ProcessStats())
    commands = [control.Release(slot=n, generation=1) for n in range(4)]
    for number, taken, missing in (
        (1, 1, False), (2, 2, False), (2, 2, False), (1, 2, False), (4, 2, True), (3, 3, True),
        (4, 4, True),
    ):  # fmt: skip
        client.take(number, control.to_bytes(commands[number - 1]))
        assert (client.taken, client.missing) == (taken, missing)
    assert [client.commands.get_nowait() for _ in range(4)] == commands
    assert client.commands.empty()


def test_what_is_no_command_ends_a_process_that_gets_it(listening, capsys):
    client = ControlClient(listening.link().connection, ProcessStats())
    client.take(1, b"garbage")
    assert client.commands.get_nowait() == control.Shutdown()
    assert "not a command: b'garbage'" in capsys.readouterr().err


def test_heartbeats_tell_what_changes(listening):
    link = listening.link()
    stats = ProcessStats()
    ControlClient(link.connection, stats).start()
    until(listening, lambda: link.heartbeat.beats)
    assert (link.heartbeat.phase, link.heartbeat.ready) == (Phase.IMPORTING, False)
    stats.members = lambda: ("compiling 3 (step)",)
    stats.enter(Phase.LOADING, 2, 10)
    stats.told()
    until(listening, lambda: link.heartbeat.phase is Phase.LOADING)
    assert str(link.heartbeat) == "loading 2 of 10"
    assert link.heartbeat.members == ("compiling 3 (step)",)
    stats.be_ready(("cpu:0",))
    until(listening, lambda: link.heartbeat.ready)
    assert link.heartbeat.devices == ("cpu:0",)
    assert link.heartbeat.takes_its_time  # a member does
    stats.members = tuple
    stats.told()
    until(listening, lambda: not link.heartbeat.members)
    assert not link.heartbeat.takes_its_time
    stats.advance()
    stats.advance()
    beats = link.heartbeat.beats
    until(listening, lambda: link.heartbeat.beats > beats)  # without being told
    assert (link.heartbeat.progress, str(link.heartbeat)) == (2, "stepping")


def test_sockets_are_private_and_removed():
    place = WorkDirectory()
    assert not place.listens
    link = place.server.link()
    path = link.connection.address.removeprefix("ipc://")
    assert stat.S_IMODE(os.stat(place.folder).st_mode) == 0o700
    assert os.path.dirname(path) == str(place.folder)
    assert stat.S_ISSOCK(os.stat(path).st_mode)
    assert place.listens
    place.close()
    assert not os.path.exists(os.path.dirname(path))


def test_an_address_that_cannot_be_had_is_named():
    with pytest.raises(OSError, match=r"cannot listen at 'tcp://192.0.2.1:1' .*choose another"):
        ControlServer("tcp://192.0.2.1:1").link()
    with pytest.raises(ValueError, match="needs an address, or a folder"):
        ControlServer()
