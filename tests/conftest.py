"""What all tests share."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `qerl` sets it, before torch is loaded
