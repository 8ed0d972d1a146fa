"""Makes `tests` importable from every test: pytest puts this file's parent on the path."""

import os

from hypothesis import HealthCheck, settings

# How long an example took says something of the machine and its other users, not of the code.
PATIENT = {"deadline": None, "suppress_health_check": (HealthCheck.too_slow,)}
# The same examples each time, so that a run says something of the change at hand; others, to look
# for what nobody has seen yet, with PERDURE_EXPLORE=1 (`make campaign`).
settings.register_profile("fixed", derandomize=True, **PATIENT)
settings.register_profile("explore", **PATIENT)
settings.load_profile("explore" if os.environ.get("PERDURE_EXPLORE") else "fixed")
