"""Things happen in their order, at their time, however late somebody looks."""

from __future__ import annotations

from penstock.emulator.timeline import Timeline


def test_what_is_due_happens_in_order_and_at_its_own_moment() -> None:
    clock = [100.0]
    timeline = Timeline(lambda: clock[0])
    seen: list[tuple[str, float]] = []
    timeline.after(5, lambda: seen.append(("late", timeline.now)))
    timeline.after(2, lambda: timeline.after(1, lambda: seen.append(("chained", timeline.now))))
    timeline.after(2, lambda: seen.append(("second", timeline.now)))
    timeline.catch_up()
    assert seen == []
    assert timeline.next_in() == 2.0
    clock[0] = 104.0
    timeline.catch_up()
    assert seen == [("second", 102.0), ("chained", 103.0)]
    assert (timeline.now, timeline.next_in()) == (104.0, 1.0)
    timeline.advance(10)
    assert seen[-1] == ("late", 105.0)
    assert (timeline.now, timeline.next_in()) == (114.0, None)


def test_a_clock_that_goes_back_does_not_undo_anything() -> None:
    clock = [100.0]
    timeline = Timeline(lambda: clock[0])
    timeline.advance(10)
    clock[0] = 50.0
    timeline.catch_up()
    assert timeline.now == 110.0
    seen: list[float] = []
    timeline.at(0.0, lambda: seen.append(timeline.now))
    timeline.catch_up()
    assert seen == [110.0], "what is put into the past happens now"
