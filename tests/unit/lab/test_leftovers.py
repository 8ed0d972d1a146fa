"""What a drive that was killed has left is told by the next one."""

import subprocess
import sys
from pathlib import Path

from perdure_lab.live.fleets.leftovers import note_submitted, tell_left

DRIVES = (
    "import sys, time\n"
    "from perdure_lab.live.fleets.leftovers import note_submitted\n"
    "note_submitted(sys.argv[1], 'gpt-drive-1', 'login', ('12', '13'))\n"
    "print('there', flush=True)\n"
    "time.sleep(3600)\n"
)


def test_the_next_drive_tells_what_a_killed_one_has_left(tmp_path: Path) -> None:
    told: list[str] = []
    alive = {"12", "13"}

    def look(host: str = "login") -> list[str]:
        told.clear()
        tell_left(str(tmp_path), host, alive.__contains__, told.append)
        return told

    words = [sys.executable, "-c", DRIVES, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as drive:
        assert drive.stdout is not None
        assert drive.stdout.readline() == "there\n"
        assert look() == [], "it drives"
        drive.kill()
    assert look("") == [], "another cluster's"
    (line,) = look()
    assert line.endswith("gpt-drive-1 was killed and has left Slurm jobs 12, 13: scancel 12 13")
    alive.remove("12")
    assert look()[0].endswith("Slurm jobs 13: scancel 13")
    alive.clear()
    assert look() == []
    assert list((tmp_path / "replay").iterdir()) == [], "forgotten"


def test_a_drive_that_has_ended_its_own_leaves_nothing(tmp_path: Path) -> None:
    note_submitted(str(tmp_path), "gpt", "", ("7",))
    assert len(list((tmp_path / "replay").iterdir())) == 1
    note_submitted(str(tmp_path), "gpt", "", ())
    assert list((tmp_path / "replay").iterdir()) == []
