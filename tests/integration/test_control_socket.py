"""The control socket: real sockets in real folders, two processes where it takes two."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from supervisor.control.actions import ActionError, Refusal
from supervisor.control.binding import BoundSocket, bind_control_socket, lock_path
from supervisor.control.client import Connection, ControlError, ask, choose_socket, find_sockets
from supervisor.control.server import ControlServer
from tests.support.actions import RecordingActions, until


@pytest.fixture
def runtime() -> Iterator[Path]:
    """A runtime folder as a login gives it: ours, 0700."""
    with tempfile.TemporaryDirectory(prefix="control-") as folder:
        yield Path(folder)


@pytest.fixture
def environ(runtime: Path) -> dict[str, str]:
    """An environment that names it."""
    return {"XDG_RUNTIME_DIR": str(runtime)}


@pytest.fixture
def config(runtime: Path) -> Path:
    """A configuration's path."""
    return runtime / "supervisor.toml"


@pytest.fixture
def actions() -> RecordingActions:
    """The seam."""
    return RecordingActions()


@pytest.fixture
def refused() -> list[int]:
    """Users that were turned away."""
    return []


@pytest.fixture
async def path(
    environ: dict[str, str], config: Path, actions: RecordingActions, refused: list[int]
) -> AsyncIterator[Path]:
    """The path of a server that answers."""
    bound = bind_control_socket(configured=None, config_path=config, environ=environ)
    server = ControlServer(bound, actions, on_refused=refused.append, idle_s=0.5)
    server.start()
    yield bound.path
    await server.close()


async def raw(path: Path, data: bytes) -> bytes:
    """Send bytes and return what comes until the end."""
    reader, writer = await asyncio.open_unix_connection(path)
    with suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


class TestPlace:
    def test_only_the_owner_can_open_it(self, environ: dict[str, str], config: Path) -> None:
        """Mode 0600, whatever the umask."""
        old = os.umask(0)
        try:
            bound = bind_control_socket(configured=None, config_path=config, environ=environ)
        finally:
            os.umask(old)
        assert stat.S_IMODE(bound.path.lstat().st_mode) == 0o600
        assert stat.S_IMODE(lock_path(bound.path).lstat().st_mode) == 0o600
        bound.close()

    def test_it_lies_in_the_runtime_folder(self, environ: dict[str, str], config: Path, runtime: Path) -> None:
        """XDG_RUNTIME_DIR comes first; the name follows from the configuration."""
        bound = bind_control_socket(configured=None, config_path=config, environ=environ)
        assert bound.path.parent == runtime
        again = bound.path
        bound.close()
        second = bind_control_socket(configured=None, config_path=config, environ=environ)
        assert second.path == again
        second.close()

    def test_closing_leaves_nothing(self, environ: dict[str, str], config: Path, runtime: Path) -> None:
        """Neither the socket nor its lock stays."""
        bind_control_socket(configured=None, config_path=config, environ=environ).close()
        assert list(runtime.iterdir()) == []

    def test_a_stale_socket_is_replaced(self, environ: dict[str, str], config: Path) -> None:
        """What a killed supervisor left is no obstacle."""
        bound = bind_control_socket(configured=None, config_path=config, environ=environ)
        bound.sock.close()
        os.close(bound._lock)
        again = bind_control_socket(configured=None, config_path=config, environ=environ)
        assert again.path == bound.path
        again.close()

    def test_a_second_supervisor_of_a_configuration_gets_its_own(self, environ: dict[str, str], config: Path) -> None:
        """Two on one machine both can be steered; the command line then asks which."""
        first = bind_control_socket(configured=None, config_path=config, environ=environ)
        second = bind_control_socket(configured=None, config_path=config, environ=environ)
        assert first.path != second.path
        with pytest.raises(ControlError, match="several") as failure:
            choose_socket(socket_path=None, configured=None, config_path=config, environ=environ)
        assert failure.value.exit_code == 2
        assert str(first.path) in str(failure.value)
        assert str(second.path) in str(failure.value)
        second.close()
        first.close()

    def test_a_configured_path_in_use_is_refused(self, runtime: Path, config: Path) -> None:
        """The message says who has it."""
        chosen = str(runtime / "chosen.sock")
        bound = bind_control_socket(configured=chosen, config_path=config, environ={})
        with pytest.raises(ConfigurationError, match=f"pid {os.getpid()}"):
            bind_control_socket(configured=chosen, config_path=config, environ={})
        bound.close()

    def test_a_path_longer_than_an_address_works(self, runtime: Path, config: Path) -> None:
        """108 bytes is the kernel's limit, not ours."""
        folder = runtime / ("d" * 100) / ("e" * 100)
        folder.mkdir(parents=True)
        bound = bind_control_socket(configured=str(folder / "c.sock"), config_path=config, environ={})
        assert bound.path.is_socket()
        bound.close()

    def test_a_file_at_the_place_is_not_replaced(self, runtime: Path, config: Path) -> None:
        """A mistyped path must not cost anybody a file."""
        precious = runtime / "precious.toml"
        precious.write_text("mine")
        with pytest.raises(ConfigurationError, match="no socket"):
            bind_control_socket(configured=str(precious), config_path=config, environ={})
        assert precious.read_text() == "mine"

    def test_a_folder_that_others_can_write_is_refused(self, runtime: Path, config: Path) -> None:
        """Somebody could put another socket in our place."""
        folder = runtime / "open"
        folder.mkdir()
        folder.chmod(0o777)
        with pytest.raises(ConfigurationError, match="written by others"):
            bind_control_socket(configured=str(folder / "c.sock"), config_path=config, environ={})

    def test_a_runtime_folder_that_is_a_link_is_passed_over(self, runtime: Path, config: Path) -> None:
        """XDG_RUNTIME_DIR may be set by anybody who starts us."""
        link = runtime / "link"
        link.symlink_to(runtime)
        bound = bind_control_socket(configured=None, config_path=config, environ={"XDG_RUNTIME_DIR": str(link)})
        assert bound.path.parent not in {link, runtime}
        bound.close()

    def test_a_planted_lock_that_is_a_link_is_not_followed(self, runtime: Path, config: Path) -> None:
        """Otherwise our owner's note would be written into any file of ours."""
        target = runtime / "target"
        target.write_text("mine")
        (runtime / "c.sock.lock").symlink_to(target)
        with pytest.raises(ConfigurationError):
            bind_control_socket(configured=str(runtime / "c.sock"), config_path=config, environ={})
        assert target.read_text() == "mine"

    def test_a_planted_socket_link_is_not_followed(self, runtime: Path, config: Path) -> None:
        """A link where the socket should be is somebody's, dangling or not."""
        (runtime / "c.sock").symlink_to(runtime / "elsewhere")
        with pytest.raises(ConfigurationError, match="no socket"):
            bind_control_socket(configured=str(runtime / "c.sock"), config_path=config, environ={})

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
    def test_a_runtime_folder_of_somebody_else_is_passed_over(self, runtime: Path, config: Path) -> None:
        """`sudo` may carry the environment of another user over."""
        folder = runtime / "theirs"
        folder.mkdir()
        os.chown(folder, 65534, 65534)
        bound = bind_control_socket(configured=None, config_path=config, environ={"XDG_RUNTIME_DIR": str(folder)})
        assert bound.path.parent != folder
        bound.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
class TestTemporaryFolder:
    @pytest.mark.parametrize("trick", ["link", "open", "file", "none"])
    def test_a_prepared_folder_in_tmp_is_refused(self, trick: str) -> None:
        """Somebody made /tmp/pgmq-supervisor-UID before us: a link, open to all, or a file."""
        uid = 54_321
        place = Path(f"/tmp/pgmq-supervisor-{uid}")
        target = Path(tempfile.mkdtemp())
        try:
            match trick:
                case "link":
                    os.chown(target, uid, uid)
                    place.symlink_to(target)
                case "open":
                    place.mkdir(mode=0o777)
                    place.chmod(0o777)
                    os.chown(place, uid, uid)
                case "file":
                    place.write_text("")
            answer = choose_folder_as(uid)
            assert answer.startswith("used" if trick == "none" else "refused"), answer
        finally:
            target.rmdir()
            if place.is_dir() and not place.is_symlink():
                place.rmdir()
            else:
                place.unlink(missing_ok=True)


CHOOSE_FOLDER_AS = """
import os, sys
sys.path.insert(0, sys.argv[2])
from shared.errors import ConfigurationError
from supervisor.control.places import usable_folder
os.setresgid(int(sys.argv[1]), int(sys.argv[1]), int(sys.argv[1]))
os.setresuid(int(sys.argv[1]), int(sys.argv[1]), int(sys.argv[1]))
try:
    print("used", usable_folder({}))
except ConfigurationError as error:
    print("refused", error)
"""


def choose_folder_as(uid: int) -> str:
    """Say which folder another user gets, or why none; what it needs is imported while everything can be read."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", CHOOSE_FOLDER_AS, str(uid), str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class TestAnswers:
    async def test_each_command_reaches_the_supervisor(self, path: Path, actions: RecordingActions) -> None:
        """The client's words are the actions' words."""
        await asyncio.to_thread(ask, path, "pause", queue="orders")
        await asyncio.to_thread(ask, path, "resume", queue="orders")
        await asyncio.to_thread(ask, path, "cancel", queue="orders", msg_id=7)
        await asyncio.to_thread(ask, path, "redrive", queue="orders", all=True)
        await asyncio.to_thread(ask, path, "drain")
        assert actions.asked == [
            ("pause", "orders"),
            ("resume", "orders"),
            ("cancel", "orders", 7),
            ("redrive", "orders", None, None),
            ("drain",),
        ]

    async def test_a_connection_serves_many_requests(self, path: Path) -> None:
        """`top` asks each second on one connection."""

        def ask_twice() -> list[dict[str, object]]:
            connection = Connection(path)
            try:
                return [connection.ask("status"), connection.ask("metrics")]
            finally:
                connection.close()

        status, metrics = await asyncio.to_thread(ask_twice)
        assert status == {"queues": {}}
        assert metrics["text"] == "text\n"

    async def test_a_refusal_says_its_reason(self, path: Path) -> None:
        """The supervisor's words come through, with exit code 1."""
        with pytest.raises(ControlError, match="no such queue") as failure:
            await asyncio.to_thread(ask, path, "pause", queue="unknown")
        assert failure.value.exit_code == 1

    async def test_a_fault_inside_is_an_answer_too(self, path: Path, actions: RecordingActions) -> None:
        """The connection and the server live on."""
        actions.failure = RuntimeError("boom")
        with pytest.raises(ControlError, match="boom"):
            await asyncio.to_thread(ask, path, "drain")
        actions.failure = ActionError(Refusal.FAILED, "database away")
        with pytest.raises(ControlError, match="database away"):
            await asyncio.to_thread(ask, path, "drain")

    @pytest.mark.parametrize(
        "line",
        [b"no", b"[]", b"{}", b'{"command": "explode"}', b'{"command": "pause"}', b'{"command": "pause", "queue": 7}',
         b'{"command": "cancel", "queue": "a", "msg_id": "7"}', b'{"command": "cancel", "queue": "a", "msg_id": true}',
         b'{"command": "redrive", "queue": "a"}', b"[" * 100_000, b"\xff\xfe"],
    )  # fmt: skip
    async def test_a_senseless_request_is_refused(self, path: Path, actions: RecordingActions, line: bytes) -> None:
        """Nothing is done, the reason is told."""
        reply = json.loads(await raw(path, line + b"\n"))
        assert (reply["ok"], reply["refusal"]) == (False, "invalid")
        assert actions.asked == []

    async def test_a_line_without_an_end_is_cut(self, path: Path) -> None:
        """A megabyte without a newline ends the connection, not the server."""
        assert await raw(path, b"x" * (1 << 20)) == b""
        assert await asyncio.to_thread(ask, path, "status") == {"queues": {}}

    async def test_a_silent_connection_is_closed(self, path: Path) -> None:
        """Who asks nothing gives the place free."""
        reader, writer = await asyncio.open_unix_connection(path)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.transport.abort()

    async def test_many_silent_connections_do_not_block_for_long(self, path: Path) -> None:
        """A hundred connections that ask nothing: an honest request is answered when they have timed out."""
        connections = [await asyncio.open_unix_connection(path) for _ in range(100)]
        async with asyncio.timeout(10):
            while True:
                with suppress(ControlError):
                    assert await asyncio.to_thread(ask, path, "status") == {"queues": {}}
                    break
        for _, writer in connections:
            writer.transport.abort()


class TestPeers:
    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
    async def test_another_user_cannot_connect(self, path: Path, runtime: Path) -> None:
        """The file's mode keeps others out even where they may enter the folder."""
        open_to_all(runtime)
        assert "PermissionError" in await asyncio.to_thread(connect_as, 65534, path)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
    async def test_another_user_is_turned_away_even_with_an_open_file(
        self, path: Path, runtime: Path, refused: list[int], actions: RecordingActions
    ) -> None:
        """Somebody changed the mode: the kernel still tells who connects."""
        open_to_all(runtime)
        open_to_all(path)
        answer = await asyncio.to_thread(connect_as, 65534, path)
        assert "true" not in answer
        await until(lambda: refused)
        assert refused == [65534]
        assert actions.asked == []

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
    def test_the_client_trusts_no_stranger(self, runtime: Path) -> None:
        """A socket that another user planted is told nothing, even by root."""
        runtime.chmod(0o777)
        planted = runtime / "planted.sock"
        with subprocess.Popen(
            [sys.executable, "-c", LISTEN_AS, "65534", str(planted)], stdout=subprocess.PIPE, text=True
        ) as stranger:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "listening\n"
            with pytest.raises(ControlError, match="not to be trusted"):
                Connection(planted)
            stranger.kill()


LISTEN_AS = """
import os, socket, sys
os.setresuid(int(sys.argv[1]), int(sys.argv[1]), int(sys.argv[1]))
s = socket.socket(socket.AF_UNIX)
s.bind(sys.argv[2])
s.listen()
print("listening", flush=True)
s.accept()[0].recv(100)
"""


def open_to_all(path: Path) -> None:
    """Undo the protection by mode."""
    path.chmod(0o777)


def connect_as(uid: int, path: Path) -> str:
    """Connect as another user and ask to drain; return what came of it."""
    code = """
import os, socket, sys
os.setresuid(int(sys.argv[1]), int(sys.argv[1]), int(sys.argv[1]))
try:
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(5)
    s.connect(sys.argv[2])
    s.sendall(b'{"command": "drain"}\\n')
    print(s.recv(1000))
except Exception as error:
    print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code, str(uid), str(path)], capture_output=True, text=True, check=True)
    return done.stdout


class TestChoosing:
    async def test_the_running_supervisor_is_found_by_its_configuration(
        self, path: Path, environ: dict[str, str], config: Path
    ) -> None:
        """The same configuration leads to the same socket."""
        chosen = choose_socket(socket_path=None, configured=None, config_path=config, environ=environ)
        assert chosen == path

    async def test_without_a_configuration_the_only_one_is_found(
        self, path: Path, environ: dict[str, str], runtime: Path
    ) -> None:
        """From any folder, when one runs."""
        assert [one.path for one in find_sockets(environ, None) if one.path.parent == runtime] == [path]

    async def test_another_configuration_is_not_steered(
        self, path: Path, environ: dict[str, str], runtime: Path
    ) -> None:
        """A supervisor that was not meant must not be paused by mistake."""
        with pytest.raises(ControlError, match="no running supervisor"):
            choose_socket(socket_path=None, configured=None, config_path=runtime / "other.toml", environ=environ)

    def test_nobody_answers_on_a_stale_socket(self, environ: dict[str, str], config: Path) -> None:
        """What a killed supervisor left is not found, and says so when it is named."""
        bound: BoundSocket = bind_control_socket(configured=None, config_path=config, environ=environ)
        bound.sock.close()
        assert find_sockets(environ, config) == []
        with pytest.raises(ControlError, match="no supervisor answers"):
            ask(bound.path, "status")
        bound.close()
