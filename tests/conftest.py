"""What all tests need of the process they run in."""

from __future__ import annotations

import signal

# A shell starts what it runs in the background with SIGINT ignored, and every program started from
# there ignores it as well; the tests of Ctrl-C need programs that do not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
