"""The process of one experiment.

usage: python -m tests.gpu.child MODULE FOLDER [--dry]
"""

import importlib
import sys
import traceback
from pathlib import Path

from tests.gpu.kit import Trial


def main(module: str, folder: Path, dry: bool) -> int:
    """Run it; what it raises is why it has failed, of which the last line comes first."""
    try:
        importlib.import_module(module).run(Trial(folder, dry))
    except BaseException as error:
        traceback.print_exc()
        lines = [line for line in str(error).splitlines() if line.strip()]
        first = lines[0] if lines else ""
        (folder / "why").write_text(f"{type(error).__name__}: {first}"[:2000])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), "--dry" in sys.argv[3:]))
