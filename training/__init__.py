"""Training commands such as `python -m training.train RECIPE.yaml`. Imports vanilla_transformer, never hub."""

import signal
import sys
import time

STARTED = time.time()  # start of the process, before slow imports

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends a command without a traceback
