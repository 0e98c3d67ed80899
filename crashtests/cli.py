"""The command line of the harness: `python -m crashtests`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from crashtests import summaries
from crashtests.checker import Verdict
from crashtests.ground import Ground, connect, ground
from crashtests.kill_points import CASES
from crashtests.modes.endurance import run_endurance
from crashtests.modes.network import SCENARIOS, NetworkRun, run_network
from crashtests.modes.nth import NthRun, run_nth
from crashtests.modes.one_case import CaseRun
from crashtests.modes.points import run_points
from crashtests.modes.random_kills import RandomRun, run_random
from crashtests.report import write
from crashtests.results import Part, load, save, versions
from crashtests.users.command import run as run_users

__all__ = ["app"]

app: Final = typer.Typer(
    name="python -m crashtests",
    help="Kill parent, children and PostgreSQL at every boundary of the failure model, and say what came of it. "
    "`run` does so to a handler of yours.",
    epilog="Exit codes: 0 all is as promised; 1 something is not, or could not be said; 2 usage.",
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)
app.command("run")(run_users)

_SIMULATED: Final = re.compile(r"(\d+) of (\d+) seeds hold, (\d+) steps")
_TAKEN: Final = re.compile(r"(\d+ of \d+) steps of the state machines taken")

_SIMULATION_COMPLAINS: Final = ("seed", "never taken")

Report = Annotated[
    Path | None, typer.Option("--report", help="Write this document, and the results as JSON beside it.")
]
Seed = Annotated[int, typer.Option("--seed", help="The first seed.")]
Minutes = Annotated[float | None, typer.Option("--minutes", help="Begin no further story after so many.")]
Workers = Annotated[int, typer.Option("--workers", help="Scenes at the same time; most of each is waiting.")]


class _Session:
    """One call of the harness: prints what happens, keeps the parts, writes the report."""

    def __init__(self, report: Path | None) -> None:
        self._report = report
        self._done: dict[str, bool] = {}
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """One line, with the time since the start."""
        typer.echo(f"{time.monotonic() - self._began:7.1f} s  {text}")

    def add(self, part: Part, began: float, postgres: str, *, took_before: float = 0.0) -> None:
        """Say how a part ended, and put it into the report."""
        part.seconds = time.monotonic() - began + took_before
        part.stamp(versions(postgres))
        self._done[part.name] = part.ok
        for line in part.problems:
            typer.echo(f"    {line}")
        figures = ", ".join(f"{name}: {value}" for name, value in part.summary.items())
        self.say(f"{part.name}: {'ok' if part.ok else 'NOT OK'}; {figures}")
        if self._report is not None:
            stored = self._report.with_suffix(".json")
            parts = {**load(stored), part.name: part}
            save(stored, parts)
            write(self._report, parts)

    def end(self) -> None:
        """Say how all of it ended, and exit."""
        failed = [name for name, ok in self._done.items() if not ok]
        where = f"; written to {self._report}" if self._report is not None else ""
        self.say((f"NOT OK: {', '.join(failed)}" if failed else "all is as promised") + where)
        raise typer.Exit(1 if failed else 0)


# --- the parts --------------------------------------------------------------------------------------------------------


def _points(session: _Session, place: Ground, runs: int, workers: int, only: str = "") -> None:
    began = time.monotonic()
    cases = [case for case in CASES if only in case.name]

    def tell(run: CaseRun) -> None:
        order = f" ({run.order})" if run.order else ""
        session.say(f"{run.verdict:7} {run.case.name}{order}: {run.seen}")
        if run.verdict is not Verdict.OK:
            typer.echo("\n".join(run.problems))

    part = summaries.of_points(*run_points(place, cases, runs=runs, workers=workers, tell=tell))
    session.add(part, began, _postgres(place))


def _nth(session: _Session, place: Ground, workers: int) -> None:
    began = time.monotonic()

    def tell(run: NthRun) -> None:
        where = "ended unkilled" if run.at is None else f"killed at {run.at.point}"
        session.say(f"{run.verdict:7} {run.name}: {where}, duplicates {run.repeats}")
        if run.verdict is not Verdict.OK:
            typer.echo("\n".join(f"    {found.rule}: {found.text}" for found in run.findings))

    part = summaries.of_nth(run_nth(place, workers=workers, each_point=True, tell=tell))
    session.add(part, began, _postgres(place))


def _random(
    session: _Session,
    place: Ground,
    seed: int,
    runs: int,
    workers: int,
    logs: Path | None,
    *,
    name: str = "random",
    minutes: float | None = None,
    earlier: Part | None = None,
) -> None:
    began = time.monotonic()
    if earlier is not None:
        seed = earlier.tally["first seed"] + earlier.tally["runs"]

    def tell(run: RandomRun) -> None:
        session.say(f"{run.verdict:7} {run.story.text()}; duplicates {run.repeats} of {run.story.repeats} allowed")
        if run.verdict is not Verdict.OK:
            typer.echo("\n".join(f"    {found.rule}: {found.text}" for found in run.findings))
            if logs is None:
                typer.echo(run.log)
            else:
                logs.mkdir(parents=True, exist_ok=True)
                (logs / f"random-{run.story.seed}.log").write_text(run.log, encoding="utf-8")

    seconds = None if minutes is None else minutes * 60
    done = run_random(range(seed, seed + runs), workers=workers, seconds=seconds, tell=tell)
    session.add(
        summaries.of_random(done, earlier, name=name),
        began,
        _postgres(place),
        took_before=earlier.seconds if earlier else 0,
    )


def _network(session: _Session, place: Ground, seed: int, runs: int, workers: int) -> None:
    began = time.monotonic()

    def tell(run: NetworkRun) -> None:
        allowed = run.scenario.repeats
        session.say(f"{run.verdict:7} {run.scenario.name}: duplicates {run.repeats} of {allowed} allowed")
        if run.verdict is not Verdict.OK:
            typer.echo("\n".join([*(f"    {found.rule}: {found.text}" for found in run.findings), run.log]))

    part = summaries.of_network(run_network(place, SCENARIOS, seed=seed, runs=runs, workers=workers, tell=tell))
    session.add(part, began, _postgres(place))


def _endurance(session: _Session, place: Ground, deaths: int) -> None:
    began = time.monotonic()
    part = summaries.of_endurance(run_endurance(place, deaths, tell=session.say))
    session.add(part, began, _postgres(place))


def _simulation(session: _Session, seeds: int, name: str = "simulation") -> None:
    """The simulator belongs to the checkout, not to the package: there it is run as its users do."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "tests" / "simulation").is_dir():
        session.say("simulation: not run, it comes with a checkout only")
        return
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.simulation", "--seed", "1", "--runs", str(seeds), "--keep-going"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    part = Part(name)
    found = _SIMULATED.search(done.stdout)
    if found is not None:
        held, of, steps = found.groups()
        part.summary = {"seeds that hold": f"{held} of {of}", "steps": steps}
    taken = _TAKEN.search(done.stdout)
    if taken is not None:
        part.summary["steps of the state machines that were taken"] = taken[1]
    if done.returncode != 0 or found is None:
        part.problems = [line for line in done.stdout.splitlines() if line.startswith(_SIMULATION_COMPLAINS)][:20]
        part.problems = part.problems or [f"it ended with {done.returncode}: {done.stderr[-500:]}"]
    session.add(part, began, "")


def _postgres(place: Ground) -> str:
    with connect(place.dsn) as connection:
        row = connection.execute("show server_version").fetchone()
        return str(row[0]).split()[0] if row else "unknown"


# --- the commands -----------------------------------------------------------------------------------------------------


@app.command("points")
def _command_points(
    report: Report = None,
    runs: Annotated[int, typer.Option(help="Runs of each row; where both are killed, at least 2.")] = 1,
    workers: Workers = 4,
    only: Annotated[str, typer.Option(help="Only rows whose name contains this.")] = "",
) -> None:
    """Kill child, parent and both at every kill point, in both modes."""
    _on_ground(report, lambda session, place: _points(session, place, runs, workers, only))


@app.command("nth")
def _command_nth(report: Report = None, workers: Workers = 4) -> None:
    """Kill who crosses the n-th sync point, for every n."""
    _on_ground(report, lambda session, place: _nth(session, place, workers))


@app.command("random")
def _command_random(
    report: Report = None,
    seed: Seed = 1,
    runs: Annotated[int, typer.Option(help="How many seeds.")] = 10,
    workers: Workers = 2,
    logs: Annotated[Path | None, typer.Option(help="Where logs of runs that are not ok go.")] = None,
    minutes: Minutes = None,
    more: Annotated[
        bool, typer.Option("--more", help="Go on behind the last seed of the report, and add to what it says.")
    ] = False,
) -> None:
    """Kill children, parent, guard, sessions, backends and PostgreSQL at random, under load."""
    earlier = _earlier(report) if more else None
    _on_ground(
        report,
        lambda session, place: _random(
            session, place, seed, runs, workers, logs, name="random soak", minutes=minutes, earlier=earlier
        ),
    )


def _earlier(report: Path | None) -> Part:
    """The random stories of a report. Only those of the same code can be added to."""
    part = load(report.with_suffix(".json")).get("random soak") if report is not None else None
    if part is None or not part.tally.get("runs"):
        raise typer.BadParameter("--more: there is no report to go on from")
    commit = versions().get("commit", "")
    if part.versions.get("commit") != commit or commit.endswith("-dirty"):
        raise typer.BadParameter(f"--more: the report is of {part.versions.get('commit')}, the code is {commit}")
    return part


@app.command("network")
def _command_network(
    report: Report = None,
    seed: Seed = 1,
    runs: Annotated[int, typer.Option(help="Runs of each scenario.")] = 1,
    workers: Workers = 3,
) -> None:
    """Put a network in between that cuts, freezes, delays and loses answers."""
    _on_ground(report, lambda session, place: _network(session, place, seed, runs, workers))


@app.command("all")
def _command_all(
    report: Report = None,
    seed: Seed = 1,
    runs: Annotated[int, typer.Option(help="Runs of each kill point.")] = 2,
    random_runs: Annotated[int, typer.Option(help="Random stories.")] = 12,
    simulate: Annotated[int, typer.Option(help="Seeds of the simulator, in a checkout.")] = 500,
    workers: Workers = 4,
) -> None:
    """Every mode once, in minutes."""

    def work(session: _Session, place: Ground) -> None:
        _points(session, place, runs, workers)
        _nth(session, place, workers)
        _random(session, place, seed, random_runs, max(1, workers // 2), None)
        _network(session, place, seed, 1, workers)
        if simulate:
            _simulation(session, simulate)

    _on_ground(report, work)


@app.command("soak")
def _command_soak(
    report: Report = None,
    seed: Seed = 1,
    runs: Annotated[int, typer.Option(help="Random stories.")] = 500,
    deaths: Annotated[int, typer.Option(help="Deaths under one supervisor, watched for leaks.")] = 1000,
    simulate: Annotated[int, typer.Option(help="Seeds of the simulator, in a checkout.")] = 10_000,
    workers: Annotated[int, typer.Option(help="Random stories at the same time.")] = 3,
    logs: Annotated[Path | None, typer.Option(help="Where logs of runs that are not ok go.")] = None,
    minutes: Minutes = None,
) -> None:
    """The long ones: hundreds of random stories, a thousand deaths, thousands of simulated worlds. 0: not that one."""

    def work(session: _Session, place: Ground) -> None:
        if deaths:
            _endurance(session, place, deaths)
        if simulate:
            _simulation(session, simulate, "simulation soak")
        if runs:
            _random(session, place, seed, runs, workers, logs, name="random soak", minutes=minutes)

    _on_ground(report, work)


def _on_ground(report: Path | None, work: Callable[[_Session, Ground], None]) -> None:
    session = _Session(report)
    os.umask(0o022)  # folders of ours must be passable for PostgreSQL's user
    with ground(say=session.say) as place:
        work(session, place)
    session.end()
