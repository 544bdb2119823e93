"""Training, run from the clone: `python -m training.train RECIPE.yaml`. It imports vanilla_transformer, never hub."""

import signal
import sys
import time

STARTED = time.time()  # of this process, before the imports that take seconds

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while a verb's imports take their seconds, Ctrl-C ends it quietly
