"""What the processor is called."""

import platform
from pathlib import Path


def cpu_model() -> str:
    """The name of the processor as it calls itself, or what kind it is; "" where neither is
    known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
