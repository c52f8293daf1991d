"""``python -m hetero_kv.demo``."""

import signal
import sys
from types import FrameType

from hetero_kv.demo.run import main, say

ENDINGS = (signal.SIGINT, signal.SIGTERM)


def interrupt(_number: int, _frame: FrameType | None) -> None:
    """The first one ends the engines in order; who leaves before them leaves them behind."""
    for ending in ENDINGS:
        signal.signal(ending, wait)
    raise KeyboardInterrupt


def wait(_number: int, _frame: FrameType | None) -> None:
    say("the engines are still ending")


for ending in ENDINGS:
    signal.signal(ending, interrupt)
sys.exit(main())
