"""Bringing checkpoints in and sharing them; run from the clone. It imports vanilla_transformer, never training."""

import signal
import sys

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while a verb's imports take their seconds, Ctrl-C ends it quietly
