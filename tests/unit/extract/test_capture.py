"""The way through the layers: every layer up to the last wanted one exactly once, and none behind it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.admission import BadInput
from penstock.extract.capture import BUFFERED_FROM, Course, Piece, arrange
from penstock.extract.config import LayerKind, ModelConfig, Rope, load_config
from penstock.extract.shapes import WITHOUT_LAYER, Kind, Site
from tests.unit.extract.reference import GOLDEN

SMALL = load_config(str(GOLDEN / "gemma3"))
LOCAL, WHOLE = LayerKind(4, Rope(1e4)), LayerKind(None, Rope(1e6))


def model(layers: int, period: int) -> ModelConfig:
    kinds = tuple(WHOLE if layer % period == period - 1 else LOCAL for layer in range(layers))
    return msgspec.structs.replace(SMALL, layers=kinds)


def post(*layers: int) -> list[Site]:
    return [Site(Kind.RESID_POST, layer) for layer in layers]


def pieces(course: Course) -> list[tuple[int, int, int]]:
    return [(piece.first, piece.period, piece.groups) for piece in course.pieces]


def test_layers_between_wanted_ones_are_scanned_and_nothing_runs_behind_the_last() -> None:
    assert pieces(arrange(model(24, 1), post(6, 12))) == [(0, 1, 6), (6, 1, 1), (7, 1, 5), (12, 1, 1)]


def test_alternating_layers_are_scanned_in_periods() -> None:
    assert pieces(arrange(model(26, 2), post(24))) == [(0, 2, 12), (24, 1, 1)]
    assert pieces(arrange(model(34, 6), post(20))) == [(0, 6, 3), (18, 1, 2), (20, 1, 1)]
    assert pieces(arrange(model(34, 6), post(9))) == [(0, 1, 5), (5, 1, 1), (6, 1, 3), (9, 1, 1)]


def test_the_stream_before_a_layer_does_not_need_the_layer() -> None:
    course = arrange(model(8, 1), [Site(Kind.RESID_PRE, 3), Site(Kind.RESID_PRE, 0)])
    assert course.reads == (Site(Kind.RESID_POST, 2), Site(Kind.EMBED))
    assert course.last == 2
    assert arrange(model(8, 1), [Site(Kind.EMBED)]).last == -1


def test_the_final_norm_needs_every_layer() -> None:
    course = arrange(model(8, 1), [Site(Kind.FINAL_NORM), *post(2)])
    assert (course.last, course.final_norm, course.ending) == (7, True, Kind.RESID_POST)


def test_many_wanted_layers_share_a_buffer() -> None:
    assert not arrange(model(24, 1), post(*range(BUFFERED_FROM - 1))).buffered
    course = arrange(model(24, 1), post(*range(0, 24, 2)))
    assert course.buffered
    assert pieces(course) == [(0, 1, 22), (22, 1, 1)]


@pytest.mark.parametrize(
    ("sites", "said"), [([], "is empty"), (post(7), "'resid_post:7' is beyond the model's last layer, 6")]
)
def test_sites_that_are_not_there_are_refused(sites: list[Site], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        arrange(SMALL, sites)


@given(
    st.integers(1, 40).flatmap(
        lambda layers: st.tuples(
            st.just(layers),
            st.integers(1, 7),
            st.sets(st.tuples(st.sampled_from(Kind), st.integers(0, layers - 1)), min_size=1, max_size=12),
        )
    )
)
def test_every_layer_that_is_needed_runs_once_in_order(drawn: tuple[int, int, set[tuple[Kind, int]]]) -> None:
    layers, period, places = drawn
    config = model(layers, period)
    sites = sorted({Site(kind, None if kind in WITHOUT_LAYER else layer) for kind, layer in places}, key=str)
    course = arrange(config, sites)
    ran = [
        piece.layer(group, slot)
        for piece in course.pieces
        for group in range(piece.groups)
        for slot in range(piece.period)
    ]
    needed = max((site.layer for site in course.reads if site.layer is not None), default=-1)
    assert ran == list(range(layers if course.final_norm else needed + 1))
    for piece in course.pieces:
        for group in range(piece.groups):
            for slot in range(piece.period):
                assert config.layers[piece.layer(group, slot)] == config.layers[piece.first + slot]
        if not course.buffered and (piece.period, piece.groups) != (1, 1):
            assert not any(course.kinds(layer) for layer in range(piece.first, piece.stop))


def test_a_piece_knows_its_layers() -> None:
    piece = Piece(3, 2, 4)
    assert (piece.stop, piece.layer(3, 1)) == (11, 10)
