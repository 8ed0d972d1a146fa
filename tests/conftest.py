"""Makes `tests` importable from every test: pytest puts this file's parent on the path."""

import os

from hypothesis import settings

# The same examples each time, so that a run says something of the change at hand; others, to look
# for what nobody has seen yet, with PERDURE_EXPLORE=1 (`make campaign`).
settings.register_profile("fixed", derandomize=True)
if not os.environ.get("PERDURE_EXPLORE"):
    settings.load_profile("fixed")
