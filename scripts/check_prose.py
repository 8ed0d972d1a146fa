#!/usr/bin/env python3
"""Fail if a file has a sentence that has to be read twice: in docstrings, comments, and messages.

usage: check_prose.py [--all] [FILE ...]

A sentence fails if it has more than 25 words, or one of the patterns below. The check covers all
Python and Markdown files of the repository, except those in scripts/prose_exempt.txt. That list can
only shrink: it fails if it is longer than an earlier version, and clean files are removed from it.
A file that was renamed is added by its new name.
With --all, print exempt files too. With FILE, check these files.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXEMPT = ROOT / "scripts" / "prose_exempt.txt"
WORDS_MAX = 25
SHOWN = 40
"""Most sentences that are printed."""
REVISIONS = 20
"""Earlier versions of the list that it is compared with."""
PATTERNS = {
    "a clause without a subject": re.compile(
        r"\b(?:of|to|by|with|for|from|at|on|in|is|are|was|than|or|but) (?:who|whom|whoever)\b"
        r"|\b(?:of|by|with|for|from|than|and|is|are|was) what (?:is|was|are|has|had|were|it)\b",
        re.I,
    ),
    "no named subject": re.compile(r"\b(?:nobody|somebody|anybody|everybody|no one)\b", re.I),
    "a quantity without a unit": re.compile(
        r"\bso (?:many|much|long|often|soon|few)\b(?! that)"
        r"|\bas (?:long|many|much) as (?:that|all)\b",
        re.I,
    ),
    "an object in front": re.compile(
        r"^(?:Of|Whoever|Whatever|Who|Since when|Until who) (?!course)"
    ),
    "a passive of telling": re.compile(
        r"\b(?:is|are|was|were|be|been) (?:told|said|heard)\b", re.I
    ),
    "an old word": re.compile(
        r"\b(?:anew|in\svain|meanwhile|beforehand|thereby|whereupon|likewise|hence|lest"
        r"|mend(?:s|ed)?|amid|one\sof\snow)\b",
        re.I,
    ),
}
SENTENCE = re.compile(
    r"(?<=[.!?:])\s+(?=[A-Z`\"'(])|\n\s*\n|\n(?= {2,}\S+ {2,})|\n\s*(?=(?:[-*]|\d+\.|\w+:) )"
)
"""Where a sentence ends: a full stop, an empty line, or the next row of a table or a list."""
FENCED = re.compile(r"(?ms)^[ \t]*(`{3,}|~{3,}).*?^[ \t]*\1[ \t]*$")
LISTED = re.compile(r"(?:^|\n)\s*[-*] |(?:^|\n)\s*\d+\. |\n?\|")


def split(text: str) -> Iterator[str]:
    """Yield the sentences of `text`; a span of code counts as one word."""
    text = re.sub(r"`[^`\n]*`", "`x`", text)
    for part in SENTENCE.split(text):
        sentence = " ".join(part.split())
        if len(sentence.split()) >= 4 and re.search(r"[a-z]{3}", sentence):
            yield sentence


def read_text(node: ast.AST) -> str:
    """Return the words of a string or an f-string, and nothing for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(read_text(part) or "`x`" for part in node.values)
    return ""


def is_code(text: str) -> bool:
    """Return whether `text` is a program or a markup rather than a message."""
    return 4 * len(re.findall(r"[{}()=;$<>|]", text)) > len(text.split())


def list_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each block of comments."""
    block: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if block and line > start + len(block):
                yield start, "\n".join(block)
                block = []
            start = start if block else line
            block.append(token.string.lstrip("#: ").strip())
    if block:
        yield start, "\n".join(block)


def list_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings, messages of four words and more, and comments, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and read_text(node.value):
            yield node.lineno, read_text(node.value)
        elif isinstance(node, ast.Call | ast.Raise | ast.Return | ast.Assign | ast.keyword):
            for inner in ast.iter_child_nodes(node):
                text = read_text(inner)
                if len(text.split()) >= 4 and not is_code(text):
                    yield getattr(inner, "lineno", 0), text
    yield from list_comments(source)


def list_markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, items of lists, and cells of tables, with their lines."""
    source = FENCED.sub(lambda match: "\n" * match.group().count("\n"), source)
    source = re.sub(r"(?m)^#.*$", "", source)
    line = 1
    for part in re.split(r"(\n[^\S\n]*\n)", source):
        if part.strip() and not part.startswith(("    ", "\t", "<!--", "!", "|---")):
            at = line + len(part) - len(part.lstrip("\n"))
            for cell in LISTED.split(part):
                yield at, cell
                at += cell.count("\n") + 1
        line += part.count("\n")


def find_faults(path: Path) -> list[str]:
    """Return one line for each sentence of `path` that fails."""
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    try:
        source = path.read_text(encoding="utf-8-sig")
        texts = list((list_markdown if path.suffix == ".md" else list_python)(source))
    except (OSError, ValueError, SyntaxError, tokenize.TokenError) as error:
        return [f"{name}:1: cannot be read: {error}"]
    faults = []
    for line, text in texts:
        for sentence in split(text):
            words = len(sentence.split())
            why = [f"{words} words"] if words > WORDS_MAX else []
            why += [what for what, pattern in PATTERNS.items() if pattern.search(sentence)]
            if why:
                faults.append(f"{name}:{line}: {', '.join(why)}: {sentence[:160]}")
    return faults


def run_git(*words: str) -> str:
    """Return what git prints, or nothing if it fails, as where there is no repository."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    ).stdout


def find_longest() -> int | None:
    """Return the length of the shortest earlier version of the list; None if there is none."""
    name = str(EXEMPT.relative_to(ROOT))
    found = run_git("log", f"-{REVISIONS}", "--format=%h", "--", name).split()
    return min((len(run_git("show", f"{r}:{name}").splitlines()) for r in found), default=None)


def main() -> int:
    """Check the files; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help="print exempt files too")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="check these files")
    options = parser.parse_args()
    if options.files:
        faults = [fault for file in options.files for fault in find_faults(file.resolve())]
        print("\n".join(faults))
        return 1 if faults else 0
    exempt = set(EXEMPT.read_text(encoding="utf-8").splitlines())
    listed = run_git("ls-files", "-z", "-co", "--exclude-standard", "*.py", "*.md").split("\0")
    by_file = {name: find_faults(ROOT / name) for name in listed if (ROOT / name).is_file()}
    if not by_file:
        print("prose: git lists no files here; nothing was checked")
        return 0
    wrong = [fault for name, found in by_file.items() if name not in exempt for fault in found]
    for fault in wrong[:SHOWN]:
        print(fault)
    clean = {name for name in exempt if not by_file.get(name)}
    if clean:
        exempt -= clean
        EXEMPT.write_text("".join(f"{name}\n" for name in sorted(exempt)), encoding="utf-8")
        print(f"prose: removed {len(clean)} clean files; commit {EXEMPT.relative_to(ROOT)}")
    longest = find_longest()
    grown = longest is not None and len(exempt) > longest
    if grown:
        print(f"{EXEMPT.relative_to(ROOT)}: the list has {len(exempt)} files, and had {longest}")
        print("hint: rewrite a file's sentences; the list can only shrink")
    if options.all:
        print("\n".join(fault for name in exempt for fault in by_file.get(name, ())))
    if wrong:
        print(f"prose: {len(wrong)} sentences have to be read twice; CONTRIBUTING.md has the rules")
    return 1 if wrong or grown else 0


if __name__ == "__main__":
    sys.exit(main())
