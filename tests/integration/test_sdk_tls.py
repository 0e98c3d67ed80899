"""The client over TLS, with a password: all of it is libpq's, and all of it passes through."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from shared.errors import ConnectionLost, ProcessError
from supervisor.embedded import EmbeddedServer, install_pgmq
from supervisor.embedded.account import account_for
from tests.support.binaries import binaries_in, chosen_binaries
from tests.support.clients import FACES, open_client
from tests.support.folders import reachable_folder

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="not run: openssl, which makes certificates, is not installed")
PASSWORD = "only in this test"  # noqa: S105 - of a server that lives for a moment


def free_port() -> int:
    """Find a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class Secured:
    """A server that speaks TLS, and the certificate that vouches for it."""

    dsn: str
    certificate: Path
    other_certificate: Path


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    """Start a server with a certificate for localhost, and a user who needs a password."""
    with reachable_folder("tls") as folder:
        certificate, key = make_certificate(folder, "server")
        other, _ = make_certificate(folder, "other")
        port = free_port()
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "ssl": "on",
            "ssl_cert_file": str(certificate),
            "ssl_key_file": str(key),
            "fsync": "off",
        }
        with started(folder, settings) as server:
            with psycopg.connect(server.dsn(), autocommit=True) as connection:
                install_pgmq(connection)
                connection.execute(sql.SQL("alter role postgres password {}").format(PASSWORD))
                connection.execute("select pgmq.create('orders')")
            dsn = f"host=localhost hostaddr=127.0.0.1 port={port} user=postgres dbname=postgres"
            yield Secured(dsn, certificate, other)


@contextlib.contextmanager
def started(folder: Path, settings: dict[str, str]) -> Iterator[EmbeddedServer]:
    """Start the tests' own server; where it is built without TLS, one of the system; else these tests are not run."""
    system = [binaries_in(place) for place in sorted(Path("/usr/lib/postgresql").glob("*"), reverse=True)]
    for number, binaries in enumerate([chosen_binaries(), *system]):
        server = EmbeddedServer(
            folder / f"pg{number}", base=folder, explicit=True, settings=settings, binaries=binaries
        )
        try:
            server.start()
        except ProcessError as error:
            if "SSL is not supported" not in (error.detail or ""):
                raise
            continue
        with server:
            yield server
        return
    pytest.skip("not run: no server here is built with TLS")


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a self-signed certificate for localhost, whose key only the server's user can read."""
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        [str(OPENSSL), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    account = account_for(None)
    certificate.chmod(0o644)
    key.chmod(0o600)
    if account.switch:
        os.chown(key, account.uid, account.gid)
    return certificate, key


@pytest.mark.parametrize("face", FACES)
async def test_a_verified_connection_works(face: str, secured: Secured) -> None:
    """`verify-full` with the right certificate and password; the session is encrypted."""
    options = {"sslmode": "verify-full", "sslrootcert": str(secured.certificate), "password": PASSWORD}
    async with open_client(face, secured.dsn, **options) as client:
        assert await client.send("orders", 1) >= 1
        async with client.transaction() as tx:
            encrypted = await tx.execute("select ssl from pg_stat_ssl where pid = pg_backend_pid()")
            assert encrypted.value() is True


@pytest.mark.parametrize("face", FACES)
async def test_a_wrong_certificate_or_password_is_refused(face: str, secured: Secured) -> None:
    """The cause is in the error, the password is not, and nothing was sent."""
    wrong_root = {"sslmode": "verify-full", "sslrootcert": str(secured.other_certificate), "password": PASSWORD}
    wrong_password = {"sslmode": "require", "password": "nonsense-secret"}
    for options, text in ((wrong_root, "certificate"), (wrong_password, "password")):
        async with open_client(face, secured.dsn, **options) as client:
            with pytest.raises(ConnectionLost, match=text) as caught:
                await client.send("orders", 1)
            assert "nothing was sent" in caught.value.message
            assert "nonsense-secret" not in repr(caught.value.fields())
