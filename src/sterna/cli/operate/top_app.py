"""The screen of `sterna top`: three tables, and dialogs that ask before anything is changed."""

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import ClassVar, Protocol, TypeVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, Label, OptionList, Static

from sterna.cli.operate.top_view import (
    Snapshot,
    Table,
    decisions_table,
    headline,
    instances_table,
    requests_table,
)
from sterna.errors import SternaError

Cells = DataTable[Text]

Answer = TypeVar("Answer")

MAX_ROWS = 500
"""Rows of a table: more take longer to draw than a refresh."""


class Cluster(Protocol):
    """What the screen shows and changes; see `top_command.Server`."""

    def snapshot(self) -> Snapshot:
        """Ask for all that is shown."""

    def migrate(self, request_id: str, destination: str) -> str:
        """Move the request."""

    def drain(self, instance_id: str, *, is_undo: bool) -> str:
        """Empty the instance, or have it serve on."""


class _Dialog(ModalScreen[str | None]):
    """A question with a few answers; Escape and q are none of them."""

    CSS = """
    _Dialog { align: center middle; }
    _Dialog > Vertical { width: auto; min-width: 44; max-width: 90%; height: auto; max-height: 80%;
        border: round $primary; background: $surface; padding: 1 2; }
    _Dialog OptionList { height: auto; max-height: 16; border: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "cancel")]

    def __init__(self, question: str, answers: list[str]) -> None:
        super().__init__()
        self._question = question
        self._answers = answers

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label(self._question, markup=False)
            yield OptionList(*self._answers, markup=False)

    def on_option_list_option_selected(self, chosen: OptionList.OptionSelected) -> None:
        self.dismiss(self._answers[chosen.option_index])


class TopApp(App[None]):
    """Refreshes the tables in the background; a server that does not answer is a line on top.

    Args:
        interval_s: time between two refreshes.
    """

    TITLE = "sterna top"
    CSS = """
    #headline { height: auto; padding: 0 1; background: $panel; }
    #headline.lost { background: $error; }
    #outcome { height: auto; padding: 0 1; color: $text-muted; }
    DataTable { border-title-color: $text; border: round $panel; }
    #instances { height: auto; max-height: 40%; }
    #requests { height: 2fr; }
    #decisions { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "migrate", "move the request"),
        Binding("d", "drain", "drain the instance"),
        Binding("u", "undo", "undo its drain"),
        Binding("p", "pause", "pause"),
        Binding("q", "quit", "end"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, cluster: Cluster, interval_s: float) -> None:
        super().__init__()
        self._cluster = cluster
        self._interval_s = interval_s
        self._is_paused = False
        self._is_asking = False
        self._instances: list[str] = []
        self._places: dict[str, str | None] = {}

    def compose(self) -> ComposeResult:
        yield Static("asking the server", id="headline", markup=False)
        for name in ("instances", "requests", "decisions"):
            table: Cells = DataTable(id=name, cursor_type="row", zebra_stripes=True)
            table.border_title = name
            yield table
        yield Static("", id="outcome", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(self._interval_s, self._refresh)
        self._main.query_one("#requests").focus()
        self._refresh()

    @property
    def _main(self) -> Screen[object]:
        """The screen with the tables, which may be behind a dialog."""
        return self.screen_stack[0]

    # ------------------------------------------------------------------------------ refreshing

    def _refresh(self) -> None:
        # A slow server must not have several questions at a time.
        if not self._is_paused and not self._is_asking:
            self._is_asking = True
            self._in_background(self._cluster.snapshot, self._show, self._show_error)

    def _in_background(
        self,
        ask: Callable[[], Answer],
        on_answer: Callable[[Answer], None],
        on_error: Callable[[str], None],
    ) -> None:
        """Ask the server in a thread, for which the end of the command does not wait."""

        def run() -> None:
            show: Callable[[], None]
            try:
                show = partial(on_answer, ask())
            except SternaError as error:
                show = partial(on_error, str(error))
            # The screen may have gone.
            with suppress(RuntimeError):
                self.call_from_thread(self._if_shown, show)

        threading.Thread(target=run, daemon=True).start()

    def _if_shown(self, show: Callable[[], None]) -> None:
        if self.is_running and self.screen_stack and self._main.query("#headline"):
            show()

    def _show(self, snapshot: Snapshot) -> None:
        self._is_asking = False
        self._instances = [each["id"] for each in snapshot.instances]
        self._places = {each["id"]: each["instance"] for each in snapshot.requests}
        line = self._main.query_one("#headline", Static)
        line.set_class(bool(snapshot.errors), "lost")
        line.update(headline(snapshot))
        self._fill("instances", instances_table(snapshot.instances))
        self._fill("requests", requests_table(snapshot.requests))
        self._fill("decisions", decisions_table(snapshot.recent["decisions"]))

    def _show_error(self, error: str) -> None:
        self._is_asking = False
        line = self._main.query_one("#headline", Static)
        line.add_class("lost")
        line.update(error)

    def _fill(self, name: str, table: Table) -> None:
        """Show these rows; the chosen row stays chosen where it goes."""
        cells = self._main.query_one(f"#{name}", DataTable)
        chosen = self._chosen(name)
        scroll_y = cells.scroll_y
        if not cells.columns:
            cells.add_columns(*table.columns)
        cells.clear()
        # Texts as they are: names come from clients, and could have markup in them.
        cells.add_rows([[Text(cell) for cell in row] for row in table.rows[:MAX_ROWS]])
        places = [row[0] for row in table.rows[:MAX_ROWS]]
        if name != "decisions" and chosen in places:
            cells.move_cursor(row=places.index(chosen), animate=False, scroll=False)
        cells.scroll_to(y=scroll_y, animate=False)

    def _chosen(self, name: str) -> str | None:
        """The first cell of the chosen row."""
        cells: Cells = self._main.query_one(f"#{name}", DataTable)
        if not 0 <= cells.cursor_row < cells.row_count:
            return None
        return cells.get_row_at(cells.cursor_row)[0].plain

    # --------------------------------------------------------------------------------- orders

    def action_pause(self) -> None:
        """Stop refreshing, or go on."""
        self._is_paused = not self._is_paused
        self._report("paused; p goes on" if self._is_paused else "")

    @work
    async def action_migrate(self) -> None:
        """Ask where the chosen request goes, and move it."""
        request_id = self._chosen("requests")
        if request_id is None:
            self._report("there is no request to move")
            return
        source = self._places.get(request_id)
        if source is None:
            self._report("the request waits at the scheduler")
            return
        others = [each for each in self._instances if each != source]
        if not others:
            self._report("there is no other instance")
            return
        question = f"Move {request_id} from {source} to"
        destination = await self.push_screen_wait(_Dialog(question, others))
        if destination is not None and await self._confirmed(f"{question} {destination}?"):
            self._order(partial(self._cluster.migrate, request_id, destination))

    @work
    async def action_drain(self) -> None:
        """Ask, and empty the chosen instance."""
        instance_id = self._chosen("instances")
        if instance_id is None:
            self._report("there is no instance to drain")
            return
        question = f"Move all requests away from {instance_id}, and end it?"
        if await self._confirmed(question):
            self._order(partial(self._cluster.drain, instance_id, is_undo=False))

    @work
    async def action_undo(self) -> None:
        """Ask, and have the chosen instance serve on."""
        instance_id = self._chosen("instances")
        if instance_id is not None and await self._confirmed(f"Have {instance_id} serve on?"):
            self._order(partial(self._cluster.drain, instance_id, is_undo=True))

    async def _confirmed(self, question: str) -> bool:
        answer = await self.push_screen_wait(_Dialog(question, ["no", "yes"]))
        return answer == "yes"

    def _order(self, order: Callable[[], str]) -> None:
        self._in_background(order, self._report, self._report)

    def _report(self, outcome: str) -> None:
        self._main.query_one("#outcome", Static).update(outcome)
