"""Whether a name that came from elsewhere may be used below a folder of ours.

A roster, an index or an archive is written by another machine, which may be broken or hostile: one
name such as `../../.ssh/authorized_keys` would have a file written (or read) anywhere. Only the
text is looked at here; that nothing on the way is a link is for who opens the file.
"""


def explain_unsafe(path: str) -> str:
    r"""Return why `path` may not be joined to a folder; empty where it stays below that folder.

    >>> explain_unsafe("job/logs/rank-0.out"), explain_unsafe("job/../../x")
    ('', 'has a segment `..`')
    """
    if not path:
        return "is empty"
    if "\0" in path:
        return "has a NUL"
    if path.startswith("/"):
        return "is absolute"
    for segment in path.split("/"):
        if segment in ("", ".", ".."):
            return f"has a segment `{segment}`" if segment else "has an empty segment"
    return ""
