"""`python -m perdure.worker.native`: build the compiled recorder for the installed torch."""

from perdure.worker.native.build import main

raise SystemExit(main())
