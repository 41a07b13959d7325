"""How vLLM's priority integers map onto Sterna's priorities. Pure."""

from sterna.types import HIGH, NORMAL, Priority


def priority_of(vllm_priority: int) -> Priority:
    """Return the priority that a request's `priority` field asks for.

    vLLM schedules lower values first and defaults to 0: a negative value asks for precedence.
    """
    return HIGH if vllm_priority < 0 else NORMAL
