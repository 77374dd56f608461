"""Deadlines against the plain dictionary they stand for, with moves, drops and clocks that jump."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.deadlines import Deadlines

TIMES = st.integers(0, 20).map(float)
STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "drop", "before"]), st.integers(0, 12).map(str), TIMES), max_size=400
)


@given(STEPS)
def test_what_is_due_is_what_a_scan_of_everything_finds(steps: list[tuple[str, str, float]]) -> None:
    deadlines, plain = Deadlines(), dict[str, float]()
    for step, id, time in steps:
        if step == "put":
            deadlines.put(id, time)
            plain[id] = time
        elif step == "drop":
            deadlines.drop(id)
            plain.pop(id, None)
        else:
            assert deadlines.before(time) == {id for id, at in plain.items() if at < time}
    same = Deadlines()
    for id in sorted(plain):
        same.put(id, plain[id])
    assert deadlines == same


def test_memory_follows_what_is_live() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.put(f"a{number}", 1e9 + number)
        deadlines.drop(f"a{number - 5}")
    assert deadlines.before(2e9) == {f"a{number}" for number in range(9_995, 10_000)}
    assert len(deadlines._heap) < 100
