"""From what a mode returns to a part of the results: its table, its figures, and what was not ok."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from crashtests.checker import Verdict
from crashtests.generator import FaultKind
from crashtests.kill_points import CASES, Case
from crashtests.modes.endurance import Endurance
from crashtests.modes.network import NetworkRun
from crashtests.modes.nth import NthRun
from crashtests.modes.one_case import CaseRun
from crashtests.modes.points import ChainEnd
from crashtests.modes.random_kills import RandomRun
from crashtests.results import Part, problem
from shared.syncpoints import POINTS

__all__ = ["of_endurance", "of_network", "of_nth", "of_points", "of_random"]


def of_points(runs: Sequence[CaseRun], ends: Sequence[ChainEnd]) -> Part:
    """One row a case."""
    part = Part("points")
    for case in CASES:
        mine = [run for run in runs if run.case.name == case.name]
        if mine:
            part.rows.append(_case_row(case, mine))
    for run in runs:
        if run.verdict is not Verdict.OK:
            order = f" ({run.order})" if run.order else ""
            first_lines = "; ".join(text.splitlines()[0] for text in run.problems if text)
            part.problems.append(f"{run.verdict}: {run.case.name}{order}: {run.seen}; {first_lines}")
    part.problems += [problem(f"after {end.cases} cases", end.findings) for end in ends if end.findings]
    part.summary = {
        "kills": len(runs),
        "rows as expected": f"{sum(row['result'] == 'ok' for row in part.rows)} of {len(CASES)}",
        "ends of supervisors checked (exit code, left-over processes, sessions, locks, all messages)": len(ends),
    }
    return part


def _case_row(case: Case, runs: Sequence[CaseRun]) -> dict[str, object]:
    verdict = _worst(run.verdict for run in runs)
    seen = list(dict.fromkeys(run.seen for run in runs))
    return {
        "case": case.name,
        "runs": len(runs),
        "seen": "; or ".join(seen),
        "repeats": sum(run.repeats for run in runs),
        "repeats_allowed": (case.runs - 1) * len(runs),
        "result": str(verdict),
    }


def _worst(verdicts: Iterable[Verdict]) -> Verdict:
    found = set(verdicts)
    return next((one for one in (Verdict.FAIL, Verdict.UNKNOWN) if one in found), Verdict.OK)


def of_nth(runs: Sequence[NthRun]) -> Part:
    """One row a sync point at which somebody was killed."""
    part = Part("nth")
    points = sorted({run.at.point for run in runs if run.at is not None})
    for point in points:
        mine = [run for run in runs if run.at is not None and run.at.point == point]
        part.rows.append(
            {
                "point": point,
                "kills": len(mine),
                "repeats": sum(run.repeats for run in mine),
                "result": str(_worst(run.verdict for run in mine)),
            }
        )
    for run in runs:
        if run.verdict is not Verdict.OK:
            where = run.at.point if run.at is not None else "nowhere"
            part.problems.append(problem(f"{run.name}, killed at {where}", run.findings))
    missed = sorted(POINTS - set(points))
    if missed:
        part.problems.append(f"unknown: nobody was killed at {', '.join(missed)}")
    part.summary = {
        "runs": len(runs),
        "the first run that ended unkilled": min(
            (run.n for run in runs if run.at is None and run.aimed is None), default="none"
        ),
        "different sync points killed at": f"{len(points)} of {len(POINTS)}",
    }
    return part


def of_random(runs: Sequence[RandomRun], earlier: Part | None = None, *, name: str = "random") -> Part:
    """One row a kind of fault. `earlier`: the part that these runs go on from, and are added to."""
    part = Part(name)
    before = {row["fault"]: row for row in earlier.rows} if earlier is not None else {}
    for kind in FaultKind:
        times = [sum(fault.kind is kind for fault in run.story.faults) for run in runs]
        had = before.get(str(kind), {"times": 0, "runs": 0})
        all_times, all_runs = had["times"] + sum(times), had["runs"] + sum(count > 0 for count in times)
        part.rows.append({"fault": str(kind), "times": all_times, "runs": all_runs})
    part.tally = _tally(runs)
    if earlier is not None:
        part.tally = {name: count + earlier.tally[name] for name, count in part.tally.items()}
        part.tally["first seed"] = earlier.tally["first seed"]
        part.problems = list(earlier.problems)
    part.summary = _random_figures(part.tally)
    part.problems += [problem(run.story.text(), run.findings) for run in runs if run.verdict is not Verdict.OK]
    return part


def _tally(runs: Sequence[RandomRun]) -> dict[str, int]:
    """Whole numbers, which may be added up."""
    rules = Counter(found.rule for run in runs for found in run.findings if found.verdict is Verdict.FAIL)
    return {
        "first seed": min((run.story.seed for run in runs), default=0),
        "runs": len(runs),
        "messages": sum(run.messages for run in runs),
        "faults": sum(len(run.story.faults) for run in runs),
        "starts": sum(run.starts for run in runs),
        "lost": rules["lost"],
        "unfinished": rules["ack of unfinished work"] + rules["ack without effect"],
        "left": rules["left"],
        "repeats": sum(run.repeats for run in runs),
        "allowed": sum(run.story.repeats for run in runs),
        **{str(verdict): sum(run.verdict is verdict for run in runs) for verdict in Verdict},
    }


def _random_figures(tally: Mapping[str, int]) -> dict[str, object]:
    first, count = tally["first seed"], tally["runs"]
    return {
        "runs": f"{count}, seeds {first} to {first + count - 1}" if count else 0,
        "unique messages": tally["messages"],
        "faults": tally["faults"],
        "starts of supervisors": tally["starts"],
        "lost": tally["lost"],
        "acknowledgements of unfinished work": tally["unfinished"],
        "left in queues": tally["left"],
        "duplicates seen / allowed": f"{tally['repeats']} / {tally['allowed']}",
        "runs ok / fail / unknown": " / ".join(str(tally[str(verdict)]) for verdict in Verdict),
    }


def of_network(runs: Sequence[NetworkRun]) -> Part:
    """One row a scenario."""
    part = Part("network")
    for scenario in dict.fromkeys(run.scenario for run in runs):
        mine = [run for run in runs if run.scenario == scenario]
        part.rows.append(
            {
                "scenario": scenario.name,
                "promise": scenario.promise,
                "runs": len(mine),
                "repeats": sum(run.repeats for run in mine),
                "repeats_allowed": scenario.repeats * len(mine),
                "result": str(_worst(run.verdict for run in mine)),
            }
        )
    part.summary = {"runs": len(runs), "unique messages": sum(run.messages for run in runs)}
    part.problems = [
        problem(f"{run.scenario.name}, seed {run.seed}", run.findings) for run in runs if run.verdict is not Verdict.OK
    ]
    return part


def of_endurance(run: Endurance) -> Part:
    """Figures only."""
    part = Part("endurance")
    part.summary = {
        "deaths under one supervisor": run.deaths,
        "deaths a second": f"{run.deaths / run.seconds:.1f}",
        "most of the first quarter of the time": _words(asdict(run.early)),
        "most of the last quarter": _words(asdict(run.late)),
    }
    if run.findings:
        part.problems = [problem("endurance", run.findings)]
    return part


def _words(sample: dict[str, int]) -> str:
    names = {"descriptors": "descriptors", "rss_kb": "KiB resident", "zombies": "zombies", "processes": "processes"}
    return ", ".join(f"{value} {names[key]}" for key, value in sample.items())
