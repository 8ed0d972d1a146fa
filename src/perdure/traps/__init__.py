"""Traps of platforms: a table of records, a pure check for each that can be looked for.

`TRAPS` is all of them; `judge` says of facts which ones lie ahead. `name_symptoms` reads what a
dead process has left. What is said before a launch of a job and a profile is made by launchers
(`launch/lint.py` and each platform's own checks), in the words of `findings`.
"""

from perdure.traps.symptoms import SYMPTOMS, name_symptoms
from perdure.traps.table import TRAPS, find_trap, judge

__all__ = ["SYMPTOMS", "TRAPS", "find_trap", "judge", "name_symptoms"]
