"""What holds for all tests."""

import os
import signal

from hypothesis import settings

from sterna.runtime.home.ray_environment import protect_ray

# A shell has what it starts in the background ignore Ctrl-C, and all that is started from there:
# tests that press it would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports Ray.
protect_ray(os.environ)

# Continuous integration judges the change, by the same examples each time; new examples are
# looked for on developers' machines.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
# A deadline in wall time fails for what else the machine does.
settings.register_profile("developer", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "developer")
