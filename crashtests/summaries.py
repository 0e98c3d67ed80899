"""From what a mode returns to a part of the results: its table, its figures, and what was not ok."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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
            part.problems.append(problem(f"n = {run.n}, killed at {where}", run.findings))
    part.summary = {
        "runs": len(runs),
        "the first run that ended unkilled": min((run.n for run in runs if run.at is None), default="none"),
        "different sync points killed at": len(points),
    }
    return part


def of_random(runs: Sequence[RandomRun]) -> Part:
    """One row a kind of fault."""
    part = Part("random")
    for kind in FaultKind:
        times = [sum(fault.kind is kind for fault in run.story.faults) for run in runs]
        part.rows.append({"fault": str(kind), "times": sum(times), "runs": sum(count > 0 for count in times)})
    rules = Counter(found.rule for run in runs for found in run.findings if found.verdict is Verdict.FAIL)
    seeds = [run.story.seed for run in runs]
    part.summary = {
        "runs": f"{len(runs)}, seeds {min(seeds)} to {max(seeds)}" if seeds else 0,
        "unique messages": sum(run.messages for run in runs),
        "faults": sum(len(run.story.faults) for run in runs),
        "starts of supervisors": sum(run.starts for run in runs),
        "lost": rules["lost"],
        "acknowledgements of unfinished work": rules["ack of unfinished work"] + rules["ack without effect"],
        "left in queues": rules["left"],
        "duplicates seen / allowed": f"{sum(run.repeats for run in runs)} / {sum(run.story.repeats for run in runs)}",
        "runs ok / fail / unknown": " / ".join(str(sum(run.verdict is one for run in runs)) for one in Verdict),
    }
    part.problems = [problem(run.story.text(), run.findings) for run in runs if run.verdict is not Verdict.OK]
    return part


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
