"""The live screen of `tpu monitor`, on textual: panels of slices, jobs, queues and events, and a log below.

Only `cli.monitor` imports it, when there is a terminal: textual is an optional part. Everything it shows are lines of
`cli.monitor_text`; what it knows comes from a `cli.monitor_feed.Feed` that runs beside it. Keys ask before they change
anything. Narrow terminals show one panel at a time, wide ones all. It must not compute what is shown.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, Label, OptionList, Static
from textual.widgets.option_list import Option
from typing_extensions import override

from penstock.cli import monitor_text, terminal
from penstock.cli.monitor_feed import Feed
from penstock.cli.monitor_model import Board, Frame
from penstock.cli.monitor_text import Line
from penstock.cli.screen import TERMINATED

if TYPE_CHECKING:
    from penstock.client.aio import AsyncClient
    from penstock.wire.api import JobView

TICK_S = 0.25  #: news are painted within this time
AGES_S = 1.0  #: and without news the ages go on so often
#: After a painting it rests so many times as long as that took, less when there is news: a thousand slices must not
#: keep a core busy.
REST, REST_NEWS = 40.0, 10.0
MAKERS: dict[str, Callable[[Frame, int], tuple[str, list[Line]]]] = {
    "slices": monitor_text.slice_lines,
    "jobs": monitor_text.job_lines,
    "queues": monitor_text.queue_lines,
    "events": monitor_text.event_lines,
}
#: Where they stand when there is room for all.
SIDES = {"left": ("slices", "jobs"), "right": ("queues", "events")}


class Panel(Vertical):
    """One list with its title line. The chosen row stays chosen while others come and go."""

    def __init__(self, name: str) -> None:
        super().__init__(id=name)
        self.border_title = name
        self._make = MAKERS[name]
        self._lines: list[Line] = []
        self._wanted: str | None = None

    @override
    def compose(self) -> ComposeResult:
        yield Static(classes="title", markup=False)
        yield OptionList(markup=False, compact=True)

    @property
    def rows(self) -> OptionList:
        return self.query_one(OptionList)

    @property
    def chosen(self) -> Line | None:
        place = self.rows.highlighted
        return self._lines[place] if place is not None and place < len(self._lines) else None

    def choose(self, key: str) -> None:
        """Put the bar on a row, now or when it comes."""
        self._wanted = key
        self._place()

    def show(self, frame: Frame) -> None:
        rows = self.rows
        title, lines = self._make(frame, max(20, rows.scrollable_content_region.width))
        self.query_one(".title", Static).update(Text.from_ansi(title))
        before, self._lines = self._lines, lines
        if [line.key for line in before] == [line.key for line in lines]:
            for number, (old, new) in enumerate(zip(before, lines, strict=True)):
                if old.text != new.text:
                    rows.replace_option_prompt_at_index(number, Text.from_ansi(new.text))
            return
        place = rows.highlighted
        if self._wanted is None and place is not None and place < len(before):
            self._wanted = before[place].key
        with self.prevent(OptionList.OptionHighlighted):
            rows.set_options(Option(Text.from_ansi(line.text), disabled=line.heading) for line in lines)
            rows.highlighted = None if place is None else min(place, len(lines) - 1)
        self._place()

    def _place(self) -> None:
        found = [place for place, line in enumerate(self._lines) if line.key == self._wanted]
        if found:
            self._wanted = None
            self.rows.highlighted = found[0]


class Question(ModalScreen[bool]):
    """Something that changes the world is asked for once more."""

    CSS = """
    Question { align: center middle; }
    Question Label { padding: 1 2; border: solid $warning; background: $surface; width: auto; max-width: 90%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q", "answer(False)", "no"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    @override
    def compose(self) -> ComposeResult:
        yield Label(f"{self._text}\n\ny yes   n no", markup=False)

    async def action_answer(self, yes: bool) -> None:
        await self.dismiss(yes)


class Monitor(App[None]):
    """The screen. `ssh` is called with a slice while the terminal is given back."""

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]  # noqa: RUF012 (textual declares it like this)
    CSS = """
    #head { height: 2; }
    #tabs { height: 1; }
    #panels { height: 2fr; }
    #log { height: 1fr; border-top: solid $primary; overflow: hidden; }
    #lines { height: 1fr; }
    Panel { height: 1fr; }
    Panel .title { height: 1; }
    OptionList { border: none; padding: 0; height: 1fr; background: $background;
                 scrollbar-size-vertical: 1; scrollbar-gutter: stable; overflow-x: hidden; }
    OptionList:focus { border: none; }
    OptionList > .option-list--option { padding: 0; }
    OptionList > .option-list--option-disabled { color: $text; }
    Input { display: none; height: 1; border: none; padding: 0; }
    .-filtering Input { display: block; }
    .-narrow Panel, .-narrow .side { display: none; }
    .-narrow Panel.-current, .-narrow .side.-current { display: block; }
    .-wide #tabs { display: none; }
    .-wide #left { width: 3fr; }
    .-wide #right { width: 2fr; margin-left: 1; }
    .-wide Panel { border-top: solid $primary; }
    .-wide Panel.-current { border-top: solid $accent; }
    .-wide #queues { height: auto; max-height: 40%; }
    .-wide #queues OptionList { height: auto; }
    .-long #panels { height: 1fr; }
    .-long #log { height: 3fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "cancel", "cancel"),
        Binding("r", "resume", "resume"),
        Binding("s", "ssh", "ssh"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("l", "long_log", "log"),
        Binding("tab", "turn(1)", "next", priority=True),
        Binding("shift+tab", "turn(-1)", show=False, priority=True),
        *(Binding(str(number), f"go('{name}')", show=False) for number, name in enumerate(MAKERS, 1)),
        Binding("escape", "unfilter", show=False),
        Binding("ctrl+z", "suspend_process", show=False),
        Binding("q,ctrl+c", "quit", "leave", key_display="q", priority=False),
    ]

    def __init__(
        self,
        board: Board,
        connect: Callable[[], AsyncClient],
        *,
        words: str = "",
        job: str | None = None,
        ssh: Callable[[str], None],
        now: Callable[[], float] = terminal.now_s,
    ) -> None:
        super().__init__()
        self.board = board
        self.feed = Feed(board, connect, self._note)
        self.words = words
        self.selected = job or board.default_selection()
        self._current = "slices"
        self._bar: str | None = None  #: the row on which the bar was seen last
        self._ssh = ssh
        self._now = now
        self._dirty = True
        self._painted_at = self._cost_s = 0.0

    @override
    def compose(self) -> ComposeResult:
        yield Static(id="head", markup=False)
        yield Static(id="tabs", markup=False)
        with Horizontal(id="panels"):
            for side, names in SIDES.items():
                with Vertical(id=side, classes="side"):
                    yield from map(Panel, names)
        with Vertical(id="log"):
            yield Static(id="lines", markup=False)
        yield Input(placeholder="words that a row must hold; Enter keeps, Esc clears", compact=True)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        slices = self.board.frame(self._now()).totals.slices
        self._choose_first()
        self.action_go("slices" if slices else "jobs")
        self.feed.select(self.selected)
        self.set_interval(TICK_S, self._tick)
        self.run_worker(self.feed.run(), name="feed", exit_on_error=True)
        # Left to itself, it would leave the terminal in raw mode.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: self.exit(return_code=TERMINATED))

    def _choose_first(self) -> None:
        """The bar stands on what is selected from the beginning."""
        if self.selected is None:
            return
        self._panel("jobs").choose(self.selected)
        frame = self.board.frame(self._now())
        for row in (row for zone in frame.zones for row in zone.slices if row.job == self.selected):
            self._panel("slices").choose(row.id)

    # --- painting ---
    @property
    def _stands(self) -> bool:
        """Whether our widgets are there: not behind a question, nor while they are taken away at the end."""
        return self.is_running and bool(self.query("#lines")) and len(self.query(Panel)) == len(MAKERS)

    def _note(self) -> None:
        self._dirty = True

    def _tick(self) -> None:
        idle_s = time.monotonic() - self._painted_at
        if idle_s >= max(AGES_S, REST * self._cost_s) or (self._dirty and idle_s >= REST_NEWS * self._cost_s):
            self.paint()

    def on_resize(self, _: Resize) -> None:
        self.call_after_refresh(self.paint)

    def paint(self) -> None:
        """Put the board on the screen as it is now."""
        if not self._stands:
            return
        began, self._dirty = time.monotonic(), False
        frame = self.board.frame(self._now(), words=self.words, selected=self.selected)
        head = monitor_text.head(frame, self.size.width)
        self.query_one("#head", Static).update(Text.from_ansi("\n".join(head), no_wrap=True))
        self.query_one("#tabs", Static).update(self._tabs())
        for panel in self.query(Panel):
            if panel.display:
                panel.show(frame)
        self._heed()
        log = self.query_one("#log", Vertical)
        log.border_title = Content(monitor_text.log_title(frame))
        lines = self.query_one("#lines", Static)
        text = Text("\n".join(monitor_text.log_lines(frame, max(1, lines.size.height))), no_wrap=True)
        text.overflow = "ellipsis"
        lines.update(text)
        self._painted_at = time.monotonic()
        self._cost_s = self._painted_at - began

    def _tabs(self) -> Text:
        tabs = Text()
        for number, name in enumerate(MAKERS, 1):
            tabs.append(f" {number} {name} ", style="reverse" if name == self._current else "dim")
        return tabs

    # --- where the reader is ---
    def _panel(self, name: str) -> Panel:
        return self.query_one(f"#{name}", Panel)

    @property
    def _line(self) -> Line | None:
        return self._panel(self._current).chosen

    def action_go(self, name: str) -> None:
        """Another list."""
        self._current = name
        for panel in self.query(Panel):
            panel.set_class(panel.id == name, "-current")
        for side, names in SIDES.items():
            self.query_one(f"#{side}").set_class(name in names, "-current")
        self._panel(name).rows.focus()
        self.call_after_refresh(self.paint)

    def action_turn(self, step: int) -> None:
        names = list(MAKERS)
        self.action_go(names[(names.index(self._current) + step) % len(names)])

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if self._stands and event.option_list.parent is self._panel(self._current):
            self._heed()

    def _heed(self) -> None:
        """Show the log of what the bar stands on. A slice that has just lost its job leaves us that job's log."""
        line = self._line
        if line is None or (line.key == self._bar and line.job is None):
            return
        self._bar = line.key
        job = line.job if line.job is not None or line.slice is not None else self.selected
        if job != self.selected:
            self.selected = job
            self.feed.select(job)
            self._note()

    def action_long_log(self) -> None:
        self.screen.toggle_class("-long")
        self.call_after_refresh(self.paint)

    # --- the filter ---
    def action_filter(self) -> None:
        self.screen.add_class("-filtering")
        field = self.query_one(Input)
        field.value = self.words
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.words = event.value
        self.paint()

    def on_input_submitted(self) -> None:
        self.screen.remove_class("-filtering")
        self.action_go(self._current)

    def action_unfilter(self) -> None:
        self.words = ""
        self.query_one(Input).value = ""
        self.on_input_submitted()

    # --- what changes something ---
    def action_cancel(self) -> None:
        job = self.board.job(self.selected)
        if job is None or job.finished_at is not None:
            self._say("choose a job that has not ended")
            return

        async def cancel(client: AsyncClient) -> str:
            reply = await client.cancel(job.id)
            return f"{reply.id} {reply.answer}"

        self._ask(f"Stop {_called(job)}?", cancel)

    def action_resume(self) -> None:
        job = self.board.job(self.selected)
        if job is None or job.finished_at is None:
            self._say("choose a job that has ended")
            return

        async def resume(client: AsyncClient) -> str:
            return f"{job.id} goes on as {(await client.resume(job.id)).id}"

        self._ask(f"Go on with {_called(job)} from its last checkpoint, as a new job?", resume)

    def _ask(self, question: str, act: Callable[[AsyncClient], Awaitable[str]]) -> None:
        async def do() -> None:
            if not await self.push_screen_wait(Question(question)):
                return
            client = self.feed.client
            if client is None:
                self._say("the server does not answer; nothing was done")
                return
            from penstock.client.errors import ApiError

            try:
                self._say(await act(client))
            except ApiError as error:
                self._say(str(error))

        self.run_worker(do(), name="act", exit_on_error=True)

    def action_ssh(self) -> None:
        line = self._line
        if line is None or line.slice is None:
            self._say("choose a slice, or a job that runs on one")
            return
        with self.suspend():
            self._ssh(line.slice)
        self.refresh()

    def _say(self, text: str) -> None:
        self.notify(terminal.safe(text), timeout=4, markup=False)


def _called(job: JobView) -> str:
    return f"{job.id} ({terminal.safe(job.name or job.kind)})"
