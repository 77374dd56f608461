"""Virtual time: it jumps, keeps order, refuses what is real, and says when nothing can happen any more."""

import asyncio
import threading

import pytest

from penstock.sim.loop import Deadlock, NotInVirtualTime, VirtualClock, VirtualLoop, run


def test_sleeping_moves_the_clock_and_nothing_else() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(86_400 * 365)
        first = loop.time()
        await asyncio.sleep(0.25)
        return first, loop.time()

    assert run(main(), start=10.0) == (10.0 + 86_400 * 365, 10.25 + 86_400 * 365)


def test_each_wake_up_costs_few_rounds() -> None:
    sleeps = 5_000

    async def main() -> int:
        for _ in range(sleeps):
            await asyncio.sleep(1.0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop.turns

    assert sleeps <= run(main()) <= 2 * sleeps + 10


@pytest.mark.parametrize("start", [0.0, 1.0e5, 1.8e9])
def test_timers_run_at_their_own_time_and_in_order(start: float) -> None:
    seen: list[tuple[str, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def note(name: str, when: float) -> None:
            seen.append((name, loop.time() - when))

        for name, delay in (("c", 0.3), ("a", 0.1), ("b", 0.2), ("b2", 0.2)):
            loop.call_at(start + delay, note, name, start + delay)
        await asyncio.sleep(1.0)

    run(main(), start=start)
    assert seen == [("a", 0.0), ("b", 0.0), ("b2", 0.0), ("c", 0.0)]


def test_two_runs_are_the_same() -> None:
    async def worker(name: int, trace: list[tuple[float, int]]) -> None:
        for step in range(20):
            await asyncio.sleep(0.1 + ((name * 7 + step * 3) % 5) / 10)
            trace.append((asyncio.get_running_loop().time(), name))

    async def main() -> list[tuple[float, int]]:
        trace: list[tuple[float, int]] = []
        await asyncio.gather(*(worker(name, trace) for name in range(10)))
        return trace

    first = run(main())
    assert len(first) == 200
    assert run(main()) == first


def test_nothing_left_to_run_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.sleep(3.0)
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match=r"at 3\.000 s"):
        run(main())


def test_a_timeout_still_ends_a_wait_for_nothing() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert run(main()) == 30.0


@pytest.mark.parametrize(
    "what",
    [
        lambda loop: asyncio.to_thread(print),
        lambda loop: loop.create_connection(asyncio.Protocol, "localhost", 80),
        lambda loop: loop.create_server(asyncio.Protocol, "localhost", 0),
        lambda loop: loop.create_datagram_endpoint(asyncio.DatagramProtocol),
        lambda loop: loop.getaddrinfo("localhost", 80),
        lambda loop: asyncio.create_subprocess_exec("true"),
        lambda loop: asyncio.create_subprocess_shell("true"),
        lambda loop: loop.add_reader(0, print),
        lambda loop: loop.add_writer(0, print),
        lambda loop: loop.add_signal_handler(15, print),
    ],
)
def test_what_is_real_is_refused(what) -> None:  # type: ignore[no-untyped-def]
    async def main() -> None:
        await what(asyncio.get_running_loop())

    with pytest.raises(NotInVirtualTime, match="under virtual time"):
        run(main())


def test_another_thread_is_refused() -> None:
    errors: list[BaseException] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def intrude() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except NotInVirtualTime as error:
                errors.append(error)

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    run(main())
    assert len(errors) == 1


def test_leftover_tasks_are_cancelled_oldest_first() -> None:
    ended: list[int] = []

    async def linger(number: int) -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append(number)

    async def main() -> None:
        tasks = [asyncio.create_task(linger(number)) for number in range(50)]
        await asyncio.sleep(1.0)
        assert len(tasks) == 50

    run(main())
    assert ended == list(range(50))


def test_an_error_in_a_watched_task_ends_the_run() -> None:
    async def broken() -> None:
        await asyncio.sleep(1.0)
        raise KeyError("broken")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.watch(loop.create_task(broken()))
        await asyncio.sleep(100.0)

    with pytest.raises(KeyError, match="broken"):
        run(main())


def test_skew_moves_now_but_never_steady() -> None:
    async def main() -> list[tuple[float, float]]:
        clock = VirtualClock(epoch=1000.0)
        readings = [(clock.now(), clock.steady())]
        await clock.sleep(5.0)
        clock.skew_s = -600.0
        readings.append((clock.now(), clock.steady()))
        return readings

    assert run(main()) == [(1000.0, 0.0), (405.0, 5.0)]
