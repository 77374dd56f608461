"""The engine on a CPU: order, steps under way, one shape, and the joined parameters against the separate ones.

Page-locked memory and the kernels need a device; `bench/extract/` checks their values there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from penstock.domain.admission import BadInput
from penstock.extract import engine as engines
from penstock.extract import gate_up
from penstock.extract.attention import Attention, Mask, plain
from penstock.extract.capture import arrange
from penstock.extract.config import LayerKind, ModelConfig, Rope
from penstock.extract.engine import Engine, keep_compiled, prepare, room
from penstock.extract.fit import Fit
from penstock.extract.mesh import MeshShape
from penstock.extract.model import Params, Step, make_step
from penstock.extract.parameters import Parameter
from penstock.extract.shapes import PackedBatch, Site, parse_sites
from penstock.extract.weights import assemble

CONFIG = ModelConfig(
    family="qwen2",
    vocab=50,
    width=32,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=8,
    norm_eps=1e-6,
    activation="silu",
    scale=8**-0.5,
    soft_cap=None,
    embed_scale=1.0,
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    tied=True,
    positions_max=64,
    layers=(LayerKind(None, Rope(10_000.0)),) * 4,
)
SITES = parse_sites("resid_post:1,3;head_out:2")


def parameters(sites: Sequence[Site] = SITES) -> Params:
    rng = np.random.default_rng(3)

    def make(tensor: Parameter, layers: object) -> jax.Array:
        count = () if layers is None else (len(list(layers)),)  # type: ignore[call-overload]
        return jnp.asarray(rng.normal(size=(*count, *tensor.shape)) * 0.2, jnp.float32)

    return assemble(CONFIG, arrange(CONFIG, sites), make)


def batch(number: int, rows: int = 2, width: int = 16) -> PackedBatch:
    tokens = np.full((rows, width), number, np.int32)
    tokens[:, ::3] += 1
    positions = np.tile(np.arange(width, dtype=np.int32), (rows, 1))
    return PackedBatch(tokens=tokens, positions=positions, segments=np.ones((rows, width), np.int32))


def doubled(_: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> dict[str, jax.Array]:
    return {"a": (tokens + segments * 0)[:, :, None] * 2, "b": positions[:, :, None].astype(jnp.bfloat16)}


@pytest.mark.parametrize("in_flight", [1, 9])
def test_results_come_in_order_and_whole(in_flight: int) -> None:
    engine = Engine(doubled, {}, rows=2, width=16, in_flight=in_flight)
    found = list(engine.run(batch(number) for number in range(5)))
    assert [int(each["a"][0, 1, 0]) for each in found] == [0, 2, 4, 6, 8]
    assert all(np.array_equal(each["a"][:, :, 0], 2 * batch(n).tokens) for n, each in enumerate(found))
    assert all(str(each["b"].dtype) == "bfloat16" for each in found)


def test_batches_are_taken_only_as_far_ahead_as_steps_may_be_under_way() -> None:
    taken: list[int] = []

    def given() -> Iterator[PackedBatch]:
        for number in range(6):
            taken.append(number)
            yield batch(number)

    engine = Engine(doubled, {}, rows=2, width=16, in_flight=3)
    results = engine.run(given())
    next(results)
    assert taken == [0, 1, 2]
    next(results)
    assert taken == [0, 1, 2, 3]
    assert len(list(results)) == 4


def test_two_threads_together_have_no_more_steps_under_way_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of one unit and the beginning of the next: memory is there for the results of so many steps."""
    monkeypatch.setattr("penstock.extract.engine.PATIENCE_S", 600)
    engine = Engine(doubled, {}, rows=2, width=16, in_flight=3)
    under_way: list[int] = [0]
    seen: list[int] = []
    lock = threading.Lock()
    start, take = engine._start, engine._take

    def started(each: PackedBatch) -> Any:
        with lock:
            under_way[0] += 1
            seen.append(under_way[0])
        return start(each)

    def taken(waiting: Any) -> Any:
        with lock:
            under_way[0] -= 1  # before its place is given away
        return take(waiting)

    monkeypatch.setattr(engine, "_start", started)
    monkeypatch.setattr(engine, "_take", taken)

    def work(first: int) -> list[int]:
        return [int(each["a"][0, 1, 0]) for each in engine.run(batch(first + n) for n in range(60))]

    with ThreadPoolExecutor(3) as threads:
        found = [threads.submit(work, first) for first in (0, 1000, 2000)]
        assert [each.result(120) for each in found] == [
            [2 * (first + n) for n in range(60)] for first in (0, 1000, 2000)
        ]
    assert max(seen) <= 3


class Held:
    """A result that is there when it is let go."""

    sharding = SimpleNamespace(memory_kind="")

    def __init__(self) -> None:
        self.there = threading.Event()

    def block_until_ready(self) -> None:
        assert self.there.wait(60)

    def __array__(self, dtype: object = None, copy: object = None) -> Any:
        return np.zeros(1)


class Device:
    """Instead of an engine's own: it works on a step until it is told that it is done."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: dict[int, Held] = {}
        self._changed = threading.Condition()
        monkeypatch.setattr(engine, "_start", self._start)

    def _start(self, each: PackedBatch) -> dict[str, Held]:
        with self._changed:
            held = self.started[int(each.tokens[0, 1])] = Held()
            self._changed.notify_all()
        return {"a": held}

    def wait(self, *steps: int) -> None:
        """Until these are all that were started."""
        with self._changed:
            assert self._changed.wait_for(lambda: tuple(self.started) == steps, 20), tuple(self.started)

    def finish(self, *steps: int) -> None:
        for step in steps:
            self.started[step].there.set()


def test_the_next_unit_is_started_when_the_last_one_leaves_and_not_when_its_own_first_step_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.extract.engine.PATIENCE_S", 600)
    engine = Engine(doubled, {}, rows=2, width=16, in_flight=3)
    device = Device(engine, monkeypatch)
    with ThreadPoolExecutor(2) as threads:
        last = engine.run(batch(number) for number in (1, 2, 3))
        found = threads.submit(next, last)
        device.wait(1, 2, 3)
        device.finish(1)
        found.result(20)
        rest = threads.submit(list, engine.run(batch(number) for number in (11, 12, 13)))
        device.wait(1, 2, 3, 11)
        device.finish(2)
        next(last)
        device.wait(1, 2, 3, 11, 12)  # while the device works on 3
        device.finish(3)
        next(last)
        device.wait(1, 2, 3, 11, 12, 13)
        device.finish(11, 12, 13)
        assert len(rest.result(20)) == 3


def test_a_run_that_stands_still_does_not_hold_up_the_others_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed, say, and whoever holds its error holds its places, too."""
    monkeypatch.setattr("penstock.extract.engine.PATIENCE_S", 0.05)
    engine = Engine(doubled, {}, rows=2, width=16, in_flight=3)
    still = engine.run(batch(number) for number in range(3))
    next(still)
    assert len(list(engine.run(batch(number) for number in range(4)))) == 4
    assert len(list(still)) == 2


@pytest.mark.parametrize("after", [0, 2])
def test_a_run_that_is_given_up_leaves_its_places_to_others(after: int) -> None:
    engine = Engine(doubled, {}, rows=2, width=16, in_flight=2)

    def failing() -> Iterator[PackedBatch]:
        yield from (batch(number) for number in range(after))
        yield batch(9, rows=1)

    for _ in range(3):
        with pytest.raises(ValueError, match="compiled for"):
            list(engine.run(failing()))
        dropped = engine.run(batch(number) for number in range(5))
        next(dropped)
        del dropped
    assert len(list(engine.run(batch(number) for number in range(5)))) == 5


def test_another_shape_is_refused_and_not_compiled() -> None:
    engine = Engine(doubled, {}, rows=2, width=16)
    with pytest.raises(ValueError, match=r"\(3, 16\) and the program was compiled for \(2, 16\)"):
        list(engine.run([batch(1, rows=3)]))


def test_the_smaller_shape_is_run_where_it_was_compiled() -> None:
    engine = Engine(doubled, {}, rows=4, width=16, small=1)
    found = list(engine.run([batch(3, rows=4), batch(5, rows=1)]))
    assert [each["a"].shape for each in found] == [(4, 16, 1), (1, 16, 1)]
    assert [int(each["a"][0, 1, 0]) for each in found] == [6, 10]
    with pytest.raises(ValueError, match=r"\(2, 16\) and the program"):
        list(engine.run([batch(1, rows=2)]))


def test_without_the_smaller_shape_there_is_the_larger_one() -> None:
    def picky(params: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> dict[str, jax.Array]:
        if tokens.shape[0] < 4:
            raise NotImplementedError("too few rows for this kernel")
        return doubled(params, tokens, positions, segments)

    engine = Engine(picky, {}, rows=4, width=16, small=1)
    assert engine.small is None
    assert engine.said[-1] == "no steps of 1 rows: too few rows for this kernel"
    assert len(list(engine.run([batch(3, rows=4)]))) == 1


def test_no_step_under_way_is_refused() -> None:
    with pytest.raises(ValueError, match="in_flight 0"):
        Engine(doubled, {}, rows=2, width=16, in_flight=0)


def test_joined_parameters_give_what_separate_ones_give_and_it_says_what_it_chose() -> None:
    params = parameters()
    engine = prepare(CONFIG, SITES, params, dtype="float32", rows=2, width=16)
    step = jax.jit(make_step(CONFIG, SITES, attention=plain(), dtype="float32"))
    for number, found in enumerate(engine.run(batch(number) for number in range(3))):
        given = batch(number)
        wanted = step(params, *(jnp.asarray(each) for each in (given.tokens, given.positions, given.segments)))
        assert set(found) == {"resid_post.1", "resid_post.3", "head_out.2"} == set(wanted)
        for name, values in found.items():
            np.testing.assert_allclose(values, wanted[name], rtol=2e-5, atol=2e-6)
    assert "plain attention: cpu has none of its own for rows of 16" in engine.said[0]
    assert "for Hopper GPUs" in engine.said[1]
    assert engine.said[2] == "3 steps under way, results to the host's memory"


def test_what_cannot_be_compiled_is_given_up_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*_: object) -> jax.Array:
        raise NotImplementedError("no such unit on this chip")

    better = Attention("better", "better attention", lambda segments: segments, attend)
    monkeypatch.setattr("penstock.extract.attention.choose", lambda *_, **__: better)
    engine = prepare(CONFIG, SITES[:1], parameters(SITES[:1]), dtype="float32", rows=2, width=16)
    assert engine.said[0] == "plain attention"
    assert "better attention" in engine.said[2]
    assert "no such unit on this chip" in engine.said[2]


NO_ROOM = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7.25GiB."


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> Params:
    """Parameters of a model that compiles at once; it asks its attention, for tests in which that fails."""

    def make(_config: object, _sites: object, *, attention: Attention, **_: object) -> Step:
        def step(given: Params, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> dict[str, jax.Array]:
            if attention.name == "better":
                attention.attend(tokens, tokens, tokens, segments, Mask(1.0))
            return doubled(given, tokens, positions, segments)

        return step

    monkeypatch.setattr(engines, "make_step", make)
    return {"pieces": ()}


def short_of_memory(monkeypatch: pytest.MonkeyPatch, rows: int, *, when: str, message: str = NO_ROOM) -> list[int]:
    """Programs of more than `rows` rows do not compile, or compile and find no room; the rows that were tried."""
    tried: list[int] = []
    compiled, start = Engine._compiled, Engine._start

    def check(many: int) -> None:
        if many > rows:
            raise jax.errors.JaxRuntimeError(f"{message}\nBufferAssignment OOM Debugging.")

    def compiling(self: Engine, step: object, shape: tuple[int, int]) -> object:
        tried.append(shape[0])
        made = compiled(self, step, shape)
        if when == "compile":
            check(shape[0])
        return made

    def starting(self: Engine, given: PackedBatch) -> dict[str, jax.Array]:
        if when == "run":
            check(given.tokens.shape[0])
        return start(self, given)

    monkeypatch.setattr(Engine, "_compiled", compiling)
    monkeypatch.setattr(Engine, "_start", starting)
    return tried


@pytest.mark.parametrize("when", ["compile", "run"])
def test_with_too_little_memory_there_are_fewer_rows(when: str, cheap: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = short_of_memory(monkeypatch, 2, when=when)
    made = prepare(CONFIG, SITES, cheap, dtype="float32", rows=8, width=16, small=4, rehearsed=True)
    assert (made.shape, made.small) == ((2, 16), 1)
    assert tried == ([8, 4, 2, 1] if when == "compile" else [8, 4, 4, 2, 2, 1])
    assert "plain attention: cpu" in made.said[0], "the way stays: others need as much"
    assert made.said[2:4] == (
        f"4 rows a step instead of 8, for which there is no memory: {NO_ROOM}",
        f"2 rows a step instead of 4, for which there is no memory: {NO_ROOM}",
    )
    found = list(made.run([batch(3, rows=2), batch(5, rows=1)]))
    assert [int(each["a"][0, 1, 0]) for each in found] == [6, 10]


def test_a_step_that_has_room_only_while_it_is_alone_is_found_out_before_the_first_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What several steps under way hold at once is held while one is rehearsed."""
    taken: list[tuple[tuple[int, ...], str]] = []
    zeros = jnp.zeros

    def counted(shape: tuple[int, ...], *given: object, **named: object) -> jax.Array:
        if "device" in named:
            taken.append((shape, str(given[0])))
        return zeros(shape, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("penstock.extract.engine.jnp.zeros", counted)
    made = Engine(doubled, {}, rows=2, width=16, in_flight=3)
    assert not taken
    made.rehearse()
    assert sorted(taken) == [((2, 16, 1), "bfloat16")] * 2 + [((2, 16, 1), "int32")] * 2


def test_when_not_even_one_row_fits_it_is_refused_with_the_arithmetic(
    cheap: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_memory(monkeypatch, 0, when="run")
    monkeypatch.setattr(engines, "_limit", lambda _: 5 << 28)
    with pytest.raises(BadInput) as caught:
        prepare(CONFIG, SITES, cheap, dtype="float32", rows=4, width=16, rehearsed=True)
    line = str(caught.value)
    assert line.startswith("memory: '1.25 GiB' of each device is too little for one row of 16 tokens a step, about 0.0")
    assert "(weights 0.00, working 0.00, results 0.00): RESOURCE_EXHAUSTED: Out of memory" in line
    assert "; cut the model with --mesh fsdp=N or tensor=N, name fewer sites" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. It should not be possible to run out of vmem",
        "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 266240, available: 232448",
        "INTERNAL: Mosaic failed to compile TPU kernel",
    ],
)
def test_a_kernel_that_asks_too_much_of_the_processor_is_given_up_and_the_rows_stay(
    message: str, cheap: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(*_: object) -> jax.Array:
        raise jax.errors.JaxRuntimeError(message)

    better = Attention("better", "better attention", lambda segments: segments, attend)
    monkeypatch.setattr("penstock.extract.attention.choose", lambda *_, **__: better)
    tried = short_of_memory(monkeypatch, 2, when="compile")
    made = prepare(CONFIG, SITES, cheap, dtype="float32", rows=2, width=16)
    assert made.shape == (2, 16)
    assert made.said[0] == "plain attention"
    assert message in made.said[2]
    # With fewer rows the kernel that failed is not tried again.
    tried.clear()
    made = prepare(CONFIG, SITES, cheap, dtype="float32", rows=4, width=16)
    assert (made.shape, tried) == ((2, 16), [4, 4, 2])


class Stand:
    """A device by its facts."""

    def __init__(self, memory: int | None = None) -> None:
        self._memory = memory

    def memory_stats(self) -> dict[str, int] | None:
        return None if self._memory is None else {"bytes_limit": self._memory, "bytes_in_use": 0}

    platform = "gpu"
    device_kind = "NVIDIA H200"
    compute_capability = "9.0"
    core_count = 132


@pytest.mark.parametrize(
    ("change", "dtype", "tokens", "word"),
    [
        ({"width": 896, "hidden": 4864}, "bfloat16", 65536, ""),
        ({"width": 896, "hidden": 4864}, "float32", 65536, "16-bit"),
        ({"width": 896, "hidden": 4864, "activation": "gelu_tanh"}, "bfloat16", 65536, "gelu_tanh"),
        ({"width": 896, "hidden": 4864}, "bfloat16", 65536 + 128, "multiples"),
        ({"width": 900, "hidden": 4864}, "bfloat16", 65536, "900"),
    ],
)
def test_the_gated_kernel_is_chosen_by_type_and_size(
    change: dict[str, object], dtype: str, tokens: int, word: str
) -> None:
    config = msgspec.structs.replace(CONFIG, **change)
    choice = gate_up.choose(Stand(), config, dtype, tokens)
    assert (choice.kernel is None) == bool(word)
    assert word in choice.reason


def test_rows_are_chosen_by_what_the_device_has() -> None:
    """Of the device with the least memory, where devices say; a mesh keeps one row of each part."""
    config = msgspec.structs.replace(CONFIG, width=896, hidden=4864, layers=CONFIG.layers * 6)
    sites = parse_sites("resid_post:all", len(config.layers))

    def found(*memory: int | None) -> Fit:
        shape = MeshShape(data=len(memory))
        devices = [Stand(each) for each in memory]
        return room(config, sites, devices, dtype="bfloat16", rows=32, width=2048, shape=shape)

    assert found(None).rows == found(80 << 30).rows == 32
    assert [found(gib << 30).rows for gib in (16, 8, 4, 2, 1)] == [32, 16, 8, 2, 1]
    assert found(80 << 30, 2 << 30).rows == 4, "two rows on each"
    assert found(2 << 30).fits
    assert not found(1 << 30).fits
    assert found(1 << 30).possible, "an estimate alone refuses nothing"
    assert not found(1 << 28).possible, "the weights are counted exactly"
    assert "'0.25 GiB' of each device is too little for one row of 2048 tokens" in str(found(1 << 28).refusal())


def test_the_gated_kernel_can_be_lowered_without_a_gpu() -> None:
    """Its values are checked on a device; that JAX still understands it is checked here."""
    shapes = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((512, 128), (512, 128))]  # type: ignore[no-untyped-call]
    traced = jax.jit(lambda x, weights: gate_up.gate_up(x, weights, processors=132)).trace(*shapes)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_compiled_programs_are_kept(tmp_path: Path) -> None:
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    try:
        keep_compiled(tmp_path / "programs")
        assert (tmp_path / "programs").is_dir()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "programs")  # type: ignore[attr-defined]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)  # type: ignore[no-untyped-call]
