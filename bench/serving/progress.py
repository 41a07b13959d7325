"""How far a run is, shown on a terminal; what is piped or logged stays clean."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(num_requests: int, what: str = "requests") -> Iterator[Callable[[int], None]]:
    """A bar on stderr, while the context lasts; gives what moves it to so many requests."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    numbers = (MofNCompleteColumn(), Elapsed())
    with Progress(*columns, *numbers, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=num_requests)
        yield lambda num_ended: shown.update(task, completed=num_ended)
