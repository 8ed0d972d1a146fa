"""How a check before a launch is written down: a row of when, in which words, and the mend.

    def check_array(spec: JobSpec) -> list[Finding]:
        return [
            *error(one_place, "all tasks would write to one place", "leave checkpoint.url out"),
            *note(spec.nodes > 1, f"{spec.nodes} nodes are emulated on the one machine"),
        ]

A row names its trap, where it is one of the table. Its words are made whether it holds or not, so
they take nothing for granted. `perdure doctor` looks at a machine by the table's own checks, which
also have words for what is well (`traps.checks`).
"""

from perdure.model.platforms.launching import Finding, Level


def error(when: object, text: str, hint: str = "", trap: str = "") -> list[Finding]:
    """Return that a job cannot be launched as it is; empty unless `when` is true of it."""
    return finding("error", when, text, hint, trap)


def warning(when: object, text: str, hint: str = "", trap: str = "") -> list[Finding]:
    """Return that a job runs, and may cost what nobody wants; empty unless `when` is true of it."""
    return finding("warning", when, text, hint, trap)


def note(when: object, text: str, hint: str = "", trap: str = "") -> list[Finding]:
    """Return what a person should know of a job; empty unless `when` is true of it."""
    return finding("note", when, text, hint, trap)


def finding(level: Level, when: object, text: str, hint: str = "", trap: str = "") -> list[Finding]:
    """Return a finding of a level that depends on what was looked at."""
    return [Finding(level, text, hint, trap)] if when else []
