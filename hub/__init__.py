"""Commands that import, export and publish checkpoints. They import vanilla_transformer, never training."""

import signal
import sys

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # imports take seconds: meanwhile, Ctrl-C exits without a traceback
