"""A server in a container, where Docker answers: for versions that are shipped in no other way."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import subprocess
from collections.abc import Iterator

from tests.matrix.fetching import NotHere

__all__ = ["container"]


@contextlib.contextmanager
def container(image: str | None) -> Iterator[str]:
    """Run an image that has PostgreSQL and PGMQ; give a superuser's DSN. Raises `NotHere`."""
    _require_docker()
    try:
        postgres = importlib.import_module("testcontainers.postgres")
    except ImportError as error:
        raise NotHere("testcontainers is not installed") from error
    if image is None:
        raise NotHere("name its image with --image")
    with postgres.PostgresContainer(image, driver=None) as running:
        yield running.get_connection_url()


def _require_docker() -> None:
    docker = shutil.which("docker")
    if docker is None:
        raise NotHere("Docker is not installed")
    try:
        asked = subprocess.run(
            [docker, "version", "--format", "{{.Server.Version}}"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NotHere("Docker does not answer") from error
    if asked.returncode != 0:
        raise NotHere("no Docker daemon answers")
