"""`perdure report`: the ledger of the paid time, as text, page or document."""

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.jobs import (
    find_job,
    say_damage,
)
from perdure.cli.speech.say import (
    AnyJob,
    Json,
    answer,
    complete_jobs,
    write_asked,
)


def report(
    job: AnyJob,
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="[OTHER]",
            help="Another job: show both, side by side.",
            autocompletion=complete_jobs,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Without OTHER: also write a page with plots."),
    ] = None,
    width: Annotated[
        int, typer.Option("--width", min=40, help="Without OTHER: columns of the text.")
    ] = 100,
    as_json: Json = False,
) -> None:
    """Print the ledger of the paid time, and each recovery by phase.

    With OTHER, it shows two jobs beside each other: time, goodput, settings, losses.
    """
    if other is not None:
        from perdure.cli.looking.compare import compare

        compare(job, other, as_json)
        return
    found = find_job(job)

    import msgspec

    from perdure.cli.looking.own import describe_own, render_own
    from perdure.cli.looking.story import tell_story
    from perdure.cli.speech.bar import Bar
    from perdure.dash.page import render_html
    from perdure.dash.text import render_text

    with Bar(as_json=as_json) as bar:
        story = tell_story(
            found,
            page=html is not None,
            tell=lambda done, total: bar.count("read", done, total, "entries"),
        )
    result, series = story.report, story.series
    damage, saved = say_damage(story.tally), describe_own(found.spec)
    own = render_own(saved, found.spec.cwd)
    if html is not None:
        page = render_html(result, found.snapshot(), series, story.matrix, own)
        write_asked(html, page, hint="--html FILE")
    text = render_text(result, series, width=width).removesuffix("\n")
    document = msgspec.to_builtins(result) | damage | saved
    answer(document, "\n".join(filter(None, (text, own))), as_json=as_json)
