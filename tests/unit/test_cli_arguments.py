"""What was typed, arranged: options may stand before a command, and `run` may be left out."""

from __future__ import annotations

from typing import Any, cast

import pytest
from typer.main import get_command

from supervisor.cli.app import build
from supervisor.cli.arguments import arrange

COMMANDS = cast("Any", get_command(build())).commands


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("", "run"),
        ("run", "run"),
        ("--config x.toml", "run --config x.toml"),
        ("--config=x.toml", "run --config=x.toml"),
        ("--queue a=t:h --queue b=t:h --concurrency 3", "run --queue a=t:h --queue b=t:h --concurrency 3"),
        ("--config run run", "run --config run"),
        ("--dsn embedded check --json", "check --dsn embedded --json"),
        ("-c x.toml send q -", "send -c x.toml q -"),
        ("--dsn d queues list", "queues list --dsn d"),
        ("queues --dsn d list --json", "queues list --dsn d --json"),
        ("send q -- -5", "send q -- -5"),
        ("--help", "--help"),
        ("-h", "--help"),
        ("--config x.toml --help", "--help"),
        ("queues --help", "queues --help"),
        ("--version", "--version"),
        ("frobnicate --config x", "frobnicate --config x"),
    ],
)
def test_arrangement(typed: str, meant: str) -> None:
    """Options go behind the command that they stand before; without a command, `run` is meant."""
    assert arrange(typed.split(), COMMANDS, "run") == meant.split()


def leaves(commands: Any, path: tuple[str, ...] = ()) -> list[tuple[str, Any]]:
    """List every command with its words."""
    found: list[tuple[str, Any]] = []
    for name, command in commands.items():
        nested = getattr(command, "commands", None)
        found += leaves(nested, (*path, name)) if nested else [(" ".join((*path, name)), command)]
    return found


@pytest.mark.parametrize(("words", "command"), leaves(COMMANDS), ids=[words for words, _ in leaves(COMMANDS)])
def test_every_command_takes_config_and_dsn(words: str, command: Any) -> None:
    """--config and --dsn are understood everywhere, and every command says in a sentence what it does."""
    options = {option for parameter in command.params for option in parameter.opts}
    assert {"--config", "--dsn"} <= options, words
    assert command.help, words
