__version__ = "0.1.0"

import os as _os

if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(_os.environ):  # benchmarks/busy_machine.py: beside one other program a run took six times as long without it
    _os.environ["GOMP_SPINCOUNT"] = "10000"  # how often a thread of torch's looks before it sleeps; is read when torch is loaded
