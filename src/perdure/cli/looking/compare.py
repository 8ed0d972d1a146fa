"""`perdure report JOB OTHER`: two jobs beside each other, by what their journals tell."""

from typing import TYPE_CHECKING, Any

from perdure.cli.jobs import Job, find_job, say_damage
from perdure.cli.speech.say import answer, render_table

if TYPE_CHECKING:
    from perdure.cli.looking.story import Story


def compare(a: str, b: str, as_json: bool) -> None:
    """Show two jobs beside each other: time, goodput, settings, losses."""
    from perdure.cli.looking.story import tell_story

    jobs = [find_job(a), find_job(b)]
    stories = [tell_story(job, page=False) for job in jobs]
    for story in stories:
        say_damage(story.tally)
    left, right = (_list_facts(j, s) for j, s in zip(jobs, stories, strict=True))
    names = [*left, *(name for name in right if name not in left)]
    rows = {name: (left.get(name), right.get(name)) for name in names}
    table = [(name, _show(name, one), _show(name, two)) for name, (one, two) in rows.items()]
    text = render_table(("", a, b), table)
    answer(
        {"jobs": [a, b], "rows": {n: list(pair) for n, pair in rows.items()}}, text, as_json=as_json
    )


def _list_facts(job: Job, story: "Story") -> dict[str, Any]:
    """Return what is compared, in the order in which it is shown."""
    report, snapshot = story.report, job.snapshot()
    facts: dict[str, Any] = {
        "state": report.state,
        "ranks": report.ranks,
        "wall_s": round(report.wall_s, 1),
        "steps": report.steps_committed,
        "step_s": report.step_s,
        "goodput": report.goodput,
        "goodput is an upper bound": report.lost_unknown,
        "incidents": report.incidents,
        "away_s": round(sum(r.total_s for r in report.recoveries if r.failed), 2),
    }
    facts |= {f"share of {name}": account.fraction for name, account in report.ledger.items()}
    facts |= {f"last {name}": value for name, value in sorted(snapshot.metrics.items())}
    return facts | {f"setting {key}": value for key, value in sorted(snapshot.settings.items())}


def _show(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "goodput" or name.startswith("share of "):
        return f"{value:.2%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
