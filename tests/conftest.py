"""What all tests share: the environment in which torch is imported."""

import os

# Else the compiler starts a pool of processes that outlives the test which asked for it.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
