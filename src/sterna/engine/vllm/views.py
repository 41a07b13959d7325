"""What an engine shows of its requests, and when."""

from collections.abc import Callable
from typing import Any

from sterna.types import InstanceId, InstanceView


class Views:
    """Shows how an engine's steps begin, and where it stands when it idles; of the step thread.

    A step's state is shown when it has been scheduled, not when it has ended: a step with a long
    prompt may take seconds, and the scheduler of the cluster has to know meanwhile which requests
    run here. States that are the same as the one before are not shown.

    Args:
        show: called with each view.
    """

    def __init__(self, instance_id: InstanceId, show: Callable[[InstanceView], None]) -> None:
        self._instance_id = instance_id
        self._show = show
        self._last: InstanceView | None = None
        self.is_terminating = False

    def follow(self, core: Any) -> None:
        """Show what each step of this core will compute, before it does."""
        core.scheduler.on_scheduled = lambda: self.publish(core)

    def on_step_end(self, core: Any) -> None:
        """Show what is left, unless another step follows at once, which will."""
        if not core.scheduler.has_requests():
            self.publish(core)

    def publish(self, core: Any) -> None:
        """Show the state of this moment."""
        view = core.scheduler.view(self._instance_id, self.is_terminating)
        if view != self._last:
            self._last = view
            self._show(view)
