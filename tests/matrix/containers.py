"""A server in a container, where Docker answers: for versions that are shipped in no other way."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import subprocess
from collections.abc import Iterator

from tests.matrix.cells import Cell
from tests.matrix.fetching import NotHere

__all__ = ["container", "image_of"]

_ANSWER_S = 30.0
_PULL_S = 600.0


def image_of(cell: Cell) -> str:
    """Name the PGMQ project's own image of a pair of versions."""
    return f"ghcr.io/pgmq/pg{cell.postgres}-pgmq:v{cell.pgmq}"


@contextlib.contextmanager
def container(image: str) -> Iterator[str]:
    """Run an image that has PostgreSQL and PGMQ; give a superuser's DSN. Raises `NotHere`."""
    _docker("version", "--format", "{{.Server.Version}}", complaint="no Docker daemon answers", timeout_s=_ANSWER_S)
    try:
        postgres = importlib.import_module("testcontainers.postgres")
    except ImportError as error:
        raise NotHere("testcontainers is not installed: pip install 'testcontainers>=4'") from error
    _docker("pull", "--quiet", image, complaint=f"the image {image} cannot be had", timeout_s=_PULL_S)
    with postgres.PostgresContainer(image, driver=None) as running:
        yield running.get_connection_url()


def _docker(*arguments: str, complaint: str, timeout_s: float) -> None:
    docker = shutil.which("docker")
    if docker is None:
        raise NotHere("Docker is not installed")
    try:
        done = subprocess.run(
            [docker, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NotHere(f"{complaint}: no answer within {timeout_s:g} s") from error
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise NotHere(": ".join([complaint, *said])[:300])
