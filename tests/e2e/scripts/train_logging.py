"""Steps as fast as asked for, each of which is logged; argument: seconds a step."""

import sys
import time

import perdure

run = perdure.init()
for step in run.steps(10_000_000):
    time.sleep(float(sys.argv[1]))
    run.log(loss=1.0 / (step + 1), step_twice=2.0 * step)
