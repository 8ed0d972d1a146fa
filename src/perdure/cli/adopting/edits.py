"""A change of a text at places of its syntax tree, and the diff that shows it."""

import ast
import difflib

import msgspec


class Change(msgspec.Struct, frozen=True):
    """What is proposed for a script."""

    text: str = ""
    """The script, changed; empty: nothing is proposed."""
    why: str = ""
    """Why nothing is proposed."""
    by_hand: tuple[str, ...] = ()
    """What a person would do, or has to know of what is proposed."""


class UnsureError(Exception):
    """Why no change is proposed, and what to do by hand."""

    def __init__(self, why: str, *by_hand: str) -> None:
        """Say `why`."""
        super().__init__(why)
        self.why, self.by_hand = why, by_hand


class Edits:
    """Changes of a text at places of its tree, whose columns count bytes."""

    def __init__(self, text: str) -> None:
        """Begin with none."""
        self.lines = text.encode().split(b"\n")
        self._inserted: dict[int, list[bytes]] = {}
        self._replaced: list[tuple[int, int, int, int, bytes]] = []

    def insert_above(self, statement: ast.stmt, text: str) -> None:
        """Put a line in front of a statement.

        Raises:
            UnsureError: it does not begin its line.
        """
        self._put(statement.lineno, self._indent_of(statement), text)

    def insert_below(self, statement: ast.stmt, text: str) -> None:
        """Put a line behind a statement that has a body, as far to the right as the statement.

        Raises:
            UnsureError: it does not begin its line.
        """
        assert statement.end_lineno is not None
        self._put(statement.end_lineno + 1, self._indent_of(statement), text)

    def insert_below_imports(self, line: int, text: str) -> None:
        """Put an import behind line `line`."""
        self._put(line + 1, b"", text)

    def _indent_of(self, statement: ast.stmt) -> bytes:
        indent = self.lines[statement.lineno - 1][: statement.col_offset]
        if indent.strip():
            raise UnsureError(f"line {statement.lineno} has more than one statement")
        return indent

    def _put(self, before: int, indent: bytes, text: str) -> None:
        end = b"\r" if self.lines[0].endswith(b"\r") else b""
        self._inserted.setdefault(before, []).append(indent + text.encode() + end)

    def replace(self, node: ast.expr, text: str) -> None:
        """Put `text` in the place of an expression."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        place = (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        self._replaced.append((*place, text.encode()))

    def apply(self) -> str:
        """Return the text with all changes."""
        lines = list(self.lines)
        for first, begin, last, end, new in self._replaced:
            head, tail = lines[first - 1][:begin], lines[last - 1][end:]
            lines[first - 1 : last] = [head + new + tail] + [b"\0"] * (last - first)
        for before in sorted(self._inserted, reverse=True):
            lines[before - 1 : before - 1] = self._inserted[before]
        return b"\n".join(line for line in lines if line != b"\0").decode()


def render_diff(name: str, old: str, new: str) -> str:
    """Return a unified diff that `patch -p0` and `git apply` take; empty where nothing changes."""
    parts = [_split(old), _split(new)]
    shown = f"./{name}" + ("\t" if " " in name else "")
    diff = difflib.unified_diff(parts[0], parts[1], fromfile=shown, tofile=shown)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in diff
    )


def _split(text: str) -> list[str]:
    """Return the lines of a text with their ends; the last one has none where the text has none."""
    *lines, last = text.split("\n")
    return [f"{line}\n" for line in lines] + ([last] if last else [])
