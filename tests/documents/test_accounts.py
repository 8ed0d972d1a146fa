"""The table of the ledger's accounts says what the page says of each."""

from pathlib import Path

from perdure.dash.svg import INKS

ROOT = Path(__file__).resolve().parents[2]


def test_each_account_is_in_the_table_with_its_meaning() -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert [f"| `{name}` | {ink.meaning} |" for name, ink in INKS.items()] == [
        row for row in rows if row.split("`")[1] in INKS
    ]
