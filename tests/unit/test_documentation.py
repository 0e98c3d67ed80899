"""What documentation names is there: links, paths, commands, make targets, pages of the site."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from supervisor.cli.app import build

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
_FOLDERS = ("supervisor", "child", "shared", "crashtests", "tests", "docs", ".ci")


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as both GitHub and mkdocs make them for our titles."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link names a file that exists, and a heading in it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in _anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_paths_exist(page: Path) -> None:
    """A path of the tree that stands in the text is in the tree."""
    for path in re.findall(rf"`((?:{'|'.join(map(re.escape, _FOLDERS))})/[\w./-]*)`", page.read_text()):
        assert (ROOT / path).exists(), path


def _typed(page: Path) -> Iterator[list[str]]:
    """What pages tell their readers to type after `pgmq-supervisor`."""
    for line in re.findall(r"pgmq-supervisor ((?:--?)?[a-z][^`\n#|]*)", page.read_text()):
        yield line.split()


def _check_command(words: list[str], command: Any) -> None:
    """Follow the words down the tree of commands, and look for their options at its end."""
    while words and getattr(command, "commands", None) and not words[0].startswith("-"):
        assert words[0] in command.commands, words
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
    for option in (word for word in words if re.fullmatch(r"--[a-z-]+", word)):
        assert option in known, (option, command.name)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_documented_commands_exist(page: Path) -> None:
    """Commands and options that a reader is told to type are commands and options."""
    top = get_command(build())
    for words in _typed(page):
        if words[0] in getattr(top, "commands", {}):
            _check_command(words, top)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_documented_make_targets_exist(page: Path) -> None:
    """`make something` is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"(?:`|^ {4})make ([a-z]+)", page.read_text(), re.MULTILINE):
        assert target in targets


def test_every_command_is_documented() -> None:
    """docs/commands.md has each command and each command of a family."""
    text = (ROOT / "docs" / "commands.md").read_text()
    for name, command in getattr(get_command(build()), "commands", {}).items():
        for words in [f"{name} {inner}" for inner in getattr(command, "commands", ())] or [name]:
            assert re.search(rf"^\| `pgmq-supervisor \[?{words}\b", text, re.MULTILINE), words


def test_every_page_is_on_the_site() -> None:
    """The navigation of mkdocs.yml has every page of docs/, and no other."""
    navigation = set(re.findall(r"^ +- (?:[\w ]+: )?([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert navigation == {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")}


def test_decisions_are_numbered_and_listed() -> None:
    """Numbers of decisions have no gap, and the list has every title."""
    folder = ROOT / "docs" / "adr"
    listed = (folder / "index.md").read_text()
    pages = sorted(page for page in folder.glob("*.md") if page.name != "index.md")
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        title = page.read_text().splitlines()[0].removeprefix("# ")
        assert f"[{page.name[:4]}]({page.name}) | {title} |" in listed
