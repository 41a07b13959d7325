"""What holds for all tests."""

import os

from hypothesis import settings

# Continuous integration judges the change, by the same examples each time; new examples are
# looked for on developers' machines.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
