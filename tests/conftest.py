"The same random cases in every run of `make test`; new ones with HYPOTHESIS_PROFILE=random, as in `make test-all`."
import os

try: from hypothesis import settings
except ImportError: pass                                        # Tests that need it say so themselves
else:
    settings.register_profile("same", derandomize=True)
    settings.register_profile("random")
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
