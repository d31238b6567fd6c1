"The same random cases in every run of `make test`; new ones with HYPOTHESIS_PROFILE=random, as in `make test-all`."
import os
import signal

# pytest-xdist's processes ignore Ctrl-C, and so would every command that a test starts and stops by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)

try: from hypothesis import settings
except ImportError: pass                                        # Tests that need it say so themselves
else:
    settings.register_profile("same", derandomize=True)
    settings.register_profile("random")
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
