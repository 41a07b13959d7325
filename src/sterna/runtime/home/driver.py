"""The driver of a run: starts and closes its supervisor, and replaces one that died.

It is a process of its own, beside that of `sterna serve`, which starts it, sends it orders and
replaces it. Serving does not depend on it, so that its death has no effect elsewhere. The
supervisor outlives it, and another driver finds the supervisor by name.
"""

import logging
import os
import pickle
import queue
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

import ray

from sterna.errors import InstanceStartError, SternaError
from sterna.runtime.actors.addresses import is_gcs_up
from sterna.runtime.fork_server.forked_worker import leave_removed_folder
from sterna.runtime.home.driver_messages import (
    NAMESPACE,
    REPORTED_STATUS,
    Changed,
    Order,
    Resubscribe,
    Serve,
    Stop,
    UseRay,
    say,
)
from sterna.runtime.home.supervisor_handle import SupervisorHandle, find_supervisors
from sterna.runtime.processes.log_lines import configure_logging
from sterna.runtime.processes.restarts import MAX_SHORT_LIVES, RestartLimit
from sterna.runtime.supervisor.ray_errors import origin_of, reason_of

CLOSE_TIMEOUT_S = 10.0
"""Time for an orderly end of the server; then it is killed. Front ends give open streams three
seconds before they cut them, and vLLM takes one or two to end, more on a busy machine."""

POLL_INTERVAL_S = 0.2
"""Time between two looks for orders during other waits."""

FIND_TIMEOUT_S = 2.0
"""Time for supervisors to tell another driver which of them acts."""

RESERVE_DELAY_S = 5.0
"""Time from the start of the acting supervisor to that of the one in reserve: urgent work comes
first."""

RESUBSCRIBE_TIMEOUT_S = 30.0
"""Time for a new GCS to come up."""

logger = logging.getLogger("sterna.launch")


class SupervisorDiedError(SternaError):
    """The supervisor has died without a successor; the message has Ray's reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the supervisor died, and the server with it: {reason}")


class Orders:
    """Orders of the process of `sterna serve`; when that process ends, the driver ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._orders: queue.SimpleQueue[UseRay | Serve | None] = queue.SimpleQueue()
        self.is_stopping = False
        self.is_urgent = False
        threading.Thread(target=self._read, name="orders", daemon=True).start()

    def next(self) -> UseRay | Serve | None:
        """Wait for the next order; None is the order to end."""
        return self._orders.get()

    def _read(self) -> None:
        while True:
            try:
                order: Order = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                os._exit(1)
            match order:
                case Stop(is_urgent):
                    self.is_urgent = self.is_urgent or is_urgent
                    self.is_stopping = True
                    self._orders.put(None)
                case Resubscribe():
                    threading.Thread(target=_resubscribe, name="resubscribe", daemon=True).start()
                case _:
                    self._orders.put(order)


class Driver:
    """Drives one run, from its start or from where another driver died."""

    _supervisor: SupervisorHandle
    _ray: UseRay
    _serve: Serve

    def __init__(self, orders: Orders, news: Connection) -> None:
        self._orders = orders
        self._news = news
        self._restart_limit = RestartLimit()
        self._reserve: SupervisorHandle | None = None
        self._reserve_due_s = 0.0

    def run(self) -> int:
        """Follow the orders; returns the exit status.

        Raises:
            SternaError: the server did not start, or a supervisor could not be replaced.
        """
        if not isinstance(connect := self._orders.next(), UseRay):
            return 0
        self._ray = connect
        leave_removed_folder()
        ray.init(
            address=connect.address,
            namespace=NAMESPACE,
            log_to_driver=True,
            logging_level="warning",
            configure_logging=True,
        )
        # Ray's handler of SIGTERM ends the process in good order, which would count as on purpose.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The actors that another driver has started belong to another job of Ray's.
        ray._private.worker.global_worker._filter_logs_by_job = False
        if not connect.is_resumed:
            self._supervisor = self._begin(is_successor=False)
        if not isinstance(serve := self._orders.next(), Serve):
            return 0
        self._serve = serve
        logging.getLogger("sterna").setLevel(serve.config.log_level)
        if connect.is_resumed:
            self._find()
        else:
            start = self._supervisor.actor.start.remote(serve.config, serve.args, serve.emulated)
            if not self._await_start(start):
                return 0
        self._news.send(Changed(is_ready=not connect.is_resumed))
        self._await_end()
        self._finish_requests()
        say("stopping")
        _close(self._supervisor.actor)
        return 0

    # ---------------------------------------------------------------------------- supervisor

    def _begin(self, *, is_successor: bool, is_reserve: bool = False) -> SupervisorHandle:
        return SupervisorHandle.begin(
            self._ray.environment,
            self._ray.metrics_folder,
            is_successor=is_successor,
            is_reserve=is_reserve,
        )

    def _find(self) -> None:
        """Go on with the supervisor that another driver has started."""
        acting, self._reserve = find_supervisors(FIND_TIMEOUT_S)
        if acting is None:
            # The supervisor has died as well.
            self._take_over()
        else:
            self._supervisor = acting

    def _await_start(self, start: ray.ObjectRef) -> bool:
        """Wait until everything is up; returns False if the order to end comes first."""
        while not self._orders.is_stopping:
            done, _ = ray.wait([start], timeout=POLL_INTERVAL_S)
            if done:
                break
        else:
            return False
        try:
            ray.get(start)
        except ray.exceptions.RayTaskError as error:
            origin = origin_of(error)
            if isinstance(origin, SternaError):
                raise origin from None
            reason = " ".join(str(origin).split())
            raise InstanceStartError(f"{type(origin).__name__}: {reason}") from error
        except ray.exceptions.RayError:
            raise SupervisorDiedError(_reason_of_end(start)) from None
        return True

    def _await_end(self) -> None:
        """Wait for the order to end, and replace supervisors that die until then.

        Raises:
            SupervisorDiedError: a supervisor died and could not be replaced.
        """
        while (reason := self._until_lost()) is not None:
            logger.error("supervisor lost reason=%s", reason)
            self._replace_supervisor()

    def _until_lost(self) -> str | None:
        """Wait until the supervisor has died or is stopped, and keep another one in reserve.
        Returns the reason of the loss, or None at the order to end."""
        supervisor = self._supervisor
        ended = supervisor.actor.run.remote()
        self._restart_limit.on_begun(time.monotonic())
        self._reserve_due_s = time.monotonic() + RESERVE_DELAY_S
        while not self._orders.is_stopping:
            if ray.wait([ended], timeout=POLL_INTERVAL_S)[0]:
                return _reason_of_end(ended)
            if (reason := supervisor.why_halted()) is not None:
                return reason
            self._keep_reserve(time.monotonic())
        return None

    def _keep_reserve(self, now_s: float) -> None:
        """Start a supervisor in reserve, and replace one that has died or is stopped."""
        if self._reserve is not None:
            if self._reserve.why_halted() is not None:
                self._reserve.end()
                self._reserve = None
                self._reserve_due_s = now_s + RESERVE_DELAY_S
        elif now_s >= self._reserve_due_s:
            self._reserve_due_s = now_s + RESERVE_DELAY_S
            if not is_gcs_up():
                return
            try:
                self._reserve = self._begin(is_successor=True, is_reserve=True)
            except ray.exceptions.RayError as error:
                logger.warning("no supervisor in reserve reason=%s", reason_of(error))

    def _replace_supervisor(self) -> None:
        """Raises SupervisorDiedError: the successor could not take over, or too many have died."""
        if self._restart_limit.on_death(time.monotonic()):
            raise SupervisorDiedError(f"{MAX_SHORT_LIVES} in a row did, soon after they began")
        self._supervisor.end()
        self._take_over()

    def _take_over(self) -> None:
        """Raises SupervisorDiedError: the successor could not take over."""
        is_from_reserve = self._reserve is not None
        self._supervisor = self._reserve or self._begin(is_successor=True)
        self._reserve = None
        serve = self._serve
        taking_over = self._supervisor.actor.take_over.remote(
            serve.config, serve.args, serve.emulated
        )
        # Also after an order to end that is not urgent: streams have time to finish.
        while not self._orders.is_urgent:
            done, _ = ray.wait([taking_over], timeout=POLL_INTERVAL_S)
            if not done and self._supervisor.why_halted() is None:
                continue
            try:
                if not done:
                    self._supervisor.end()
                ray.get(taking_over)
            except ray.exceptions.RayError:
                reason = _reason_of_end(taking_over)
                if not is_from_reserve:
                    raise SupervisorDiedError(reason) from None
                logger.error("supervisor in reserve lost reason=%s", reason)
                self._supervisor.end()
                self._take_over()
            else:
                self._news.send(Changed(is_ready=False))
            return

    def _finish_requests(self) -> None:
        """Let requests finish, unless the order to end is urgent."""
        timeout_s = self._serve.shutdown_timeout_s
        if self._orders.is_urgent or timeout_s <= 0:
            return
        say(f"shutting down: requests have {timeout_s:g} s to finish; Ctrl-C cuts them")
        deadline_s = time.monotonic() + timeout_s
        num_left = None
        while num_left is None and not self._orders.is_urgent:
            left_s = max(0.0, deadline_s - time.monotonic())
            finishing = self._supervisor.actor.finish_requests.remote(left_s)
            lost = None
            while lost is None and not ray.wait([finishing], timeout=POLL_INTERVAL_S)[0]:
                if self._orders.is_urgent:
                    return
                if time.monotonic() > deadline_s + CLOSE_TIMEOUT_S:
                    # The limit holds whether or not they answer.
                    logger.error("a front end or the supervisor does not answer")
                    return
                lost = self._supervisor.why_halted()
            if lost is None:
                try:
                    num_left = ray.get(finishing)
                except ray.exceptions.RayError:
                    lost = _reason_of_end(finishing)
            if lost is not None:
                logger.error("supervisor lost reason=%s", lost)
                self._replace_supervisor()
        if num_left:
            say(f"{num_left} requests did not finish within {timeout_s:g} s and are cut")


def _resubscribe() -> None:
    """Subscribe to the lines that actors print: Ray's own subscription ends with the GCS at which
    it was made."""
    deadline_s = time.monotonic() + RESUBSCRIBE_TIMEOUT_S
    while time.monotonic() < deadline_s:
        # A client that is still connecting subscribes by itself.
        subscriber = getattr(ray._private.worker.global_worker, "gcs_log_subscriber", None)
        try:
            if subscriber is not None:
                subscriber.subscribe()
            return
        except ray.exceptions.RpcError:
            time.sleep(POLL_INTERVAL_S)
    logger.warning("the output of actors is no longer shown: Ray's GCS does not answer")


def _reason_of_end(call: ray.ObjectRef) -> str:
    """Return why a call of the supervisor has ended, in one line."""
    try:
        ray.get(call)
    except ray.exceptions.RayError as error:
        return reason_of(error)
    return "it returned"


def _close(supervisor: ray.actor.ActorHandle) -> None:
    """Ask all actors to end; those that do not are killed with Ray."""
    try:
        ray.get(supervisor.close.remote(), timeout=CLOSE_TIMEOUT_S)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        logger.warning("not everything ended by itself reason=%s", type(error).__name__)


def main() -> int:
    """Run the driver of the process that has started this one; returns the exit status."""
    configure_logging("INFO")
    orders, news = (Connection(int(each)) for each in sys.argv[1:3])
    try:
        return Driver(Orders(orders), news).run()
    except SternaError as error:
        say(f"sterna: error: {error}")
        return REPORTED_STATUS
    except Exception:
        # Another driver goes on. Python's own end would wait for Ray's client.
        logger.exception("driver failed")
        return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: what Ray's client leaves behind ends with the process that started Ray.
    os._exit(status)
