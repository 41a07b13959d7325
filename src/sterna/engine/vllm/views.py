"""Views of an engine's requests, published at the beginning of steps and when the engine idles."""

from collections.abc import Callable
from typing import Any

from sterna.types import InstanceId, InstanceView


class Views:
    """Publishes the state of an engine at the beginning of each step and when it idles; belongs to
    the step thread.

    A step's state is published when it has been scheduled, not when it has ended: a step with a
    long prompt may take seconds, and the scheduler of the cluster must know meanwhile which
    requests run here. A state that equals the previous one is not published.

    Args:
        show: called with each view.
    """

    def __init__(self, instance_id: InstanceId, show: Callable[[InstanceView], None]) -> None:
        self._instance_id = instance_id
        self._show = show
        self._last: InstanceView | None = None
        self.is_terminating = False

    def follow(self, core: Any) -> None:
        """Publish the state of each step of this core before it is computed."""
        core.scheduler.on_scheduled = lambda: self.publish(core)

    def on_step_end(self, core: Any) -> None:
        """Publish the state, unless another step follows at once, which will do so."""
        if not core.scheduler.has_requests():
            self.publish(core)

    def publish(self, core: Any) -> None:
        """Publish the current state if it has changed."""
        view = core.scheduler.view(self._instance_id, self.is_terminating)
        if view != self._last:
            self._last = view
            self._show(view)
