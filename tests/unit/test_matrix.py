"""The matrix of versions: what cannot be had is told, never passed over."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.matrix import containers, fetching, running, versions
from tests.matrix.cells import CELLS, OLDEST, Cell, Outcome, parse
from tests.matrix.fetching import NotHere

REPORT = """<testsuites><testsuite>
<testcase classname="tests.integration.a" name="one"/>
<testcase classname="tests.integration.a" name="two"><failure message="no"/></testcase>
<testcase classname="tests.integration.a" name="three"><error message="no"/></testcase>
<testcase classname="tests.integration.a" name="four"><skipped message="not run: no partman"/></testcase>
<testcase classname="tests.integration.a" name="five"><skipped message="not run: no partman"/></testcase>
</testsuite></testsuites>"""


def test_every_pair_has_a_cell() -> None:
    """Five servers, two versions of PGMQ as SQL, one as an image."""
    assert {cell.postgres for cell in CELLS} == {14, 15, 16, 17, 18}
    assert {cell.pgmq for cell in CELLS} == {"1.11.1", "1.12.0", "1.13.0"}
    assert OLDEST in CELLS
    assert [containers.image_of(cell) for cell in CELLS if cell.image] == ["ghcr.io/pgmq/pg18-pgmq:v1.12.0"]
    assert parse("15:1.11.1") == OLDEST
    with pytest.raises(ValueError, match=r"no cell 13:1\.0"):
        parse("13:1.0")


def test_a_server_that_cannot_be_had_is_not_run_with_its_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place that was tried stands in the reason."""

    def nothing(*_: object) -> Path:
        raise NotHere("not today")

    for place in ("_installed", "_system", "_from_npm", "wheel"):
        monkeypatch.setattr(versions, place, nothing)
    result = running.run(Cell(16, "1.13.0"), running.ALL, image=None)
    assert result.outcome is Outcome.NOT_RUN
    assert result.reason.count("not today") == 4
    assert json.dumps(result.fields())


def test_a_version_of_pgmq_without_a_wheel_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason names it."""
    monkeypatch.setattr(running, "server_of", lambda major: versions.Server(None, f"{major}.0", "here"))
    assert "0.9" in running.run(Cell(18, "0.9"), running.ALL, image=None).reason


@pytest.mark.parametrize(("found", "code", "reason"), [(None, 0, "not installed"), ("docker", 1, "no Docker daemon")])
def test_containers_need_a_docker_that_answers(
    monkeypatch: pytest.MonkeyPatch, found: str | None, code: int, reason: str
) -> None:
    """Without one the cell is not run, and says why."""
    monkeypatch.setattr("shutil.which", lambda _: found)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: subprocess.CompletedProcess([], code, "", ""))
    with pytest.raises(NotHere, match=reason), containers.container("image"):
        pass
    assert running.run(Cell(18, "1.12.0", image=True), running.ALL, image="image").outcome is Outcome.NOT_RUN


def test_reports_are_counted(tmp_path: Path) -> None:
    """Failures by name, skips by reason."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    result = running._read(report, cell=OLDEST, server="15", seconds=1.0, log="log", code=1)
    assert (result.outcome, result.passed, result.failed, result.skipped) == (Outcome.FAILED, 1, 2, 2)
    assert result.failures == ("tests.integration.a::two", "tests.integration.a::three")
    assert result.skips == ("2 x no partman",)


def test_a_run_without_tests_is_no_success(tmp_path: Path) -> None:
    """An exit code of 5 is told."""
    report = tmp_path / "report.xml"
    report.write_text("<testsuites/>")
    result = running._read(report, cell=OLDEST, server="15", seconds=1.0, log="log", code=5)
    assert (result.outcome, result.reason) == (Outcome.FAILED, "pytest ended with 5")


def test_what_is_fetched_gets_its_name_when_it_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A failed try leaves nothing behind; a finished one is not made again."""
    monkeypatch.setattr(fetching, "CACHE", tmp_path)

    def half(folder: Path) -> None:
        (folder / "half").touch()
        raise NotHere("the network is down")

    with pytest.raises(NotHere):
        fetching._once("thing-1", half)
    assert list(tmp_path.iterdir()) == []
    made = fetching._once("thing-1", lambda folder: (folder / "whole").touch())
    assert fetching._once("thing-1", half) == made
    assert (made / "whole").exists()


def test_links_that_a_package_cannot_hold_are_made(tmp_path: Path) -> None:
    """Only inside the folder, and none twice."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libx.so.1.2").touch()
    links = [
        {"source": "native/lib/libx.so.1.2", "target": "native/lib/libx.so.1"},
        {"source": "native/lib/libx.so.1.2", "target": "native/lib/libx.so.1"},
        {"source": "native/lib/libx.so.1.2", "target": "native/bin/elsewhere"},
    ]
    (tmp_path / "pg-symlinks.json").write_text(json.dumps(links))
    fetching._restore_links(tmp_path, "native")
    assert (tmp_path / "lib" / "libx.so.1").readlink() == Path("libx.so.1.2")
    assert not (tmp_path / "bin").exists()
