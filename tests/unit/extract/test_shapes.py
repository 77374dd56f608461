"""Sites as text, and what is refused of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.domain.admission import BadInput
from penstock.extract.shapes import WITHOUT_LAYER, Kind, Site, parse_sites

SITES = st.builds(
    lambda kind, layer: Site(kind, None if kind in WITHOUT_LAYER else layer), st.sampled_from(Kind), st.integers(0, 99)
)


@given(st.lists(SITES, min_size=1, max_size=20, unique=True))
def test_what_is_written_is_read_back(sites: list[Site]) -> None:
    assert parse_sites(";".join(str(site) for site in sites)) == tuple(sites)
    assert len({site.name for site in sites}) == len(sites)


def test_lists_ranges_and_all() -> None:
    found = parse_sites("resid_post:10,12, 20-22;attn_out:all; final_norm;resid_post:12", layers=24)
    assert [str(site) for site in found[:5]] == [f"resid_post:{n}" for n in (10, 12, 20, 21, 22)]
    assert found[5:-1] == tuple(Site(Kind.ATTN_OUT, n) for n in range(24))
    assert found[-1] == Site(Kind.FINAL_NORM)
    assert (found[0].name, found[-1].name) == ("resid_post.10", "final_norm")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no site; use KIND:LAYERS"),
        ("resid:3", "is no site"),
        ("resid_post", "has no layers; write resid_post:0"),
        ("resid_post:", "has '' for a layer"),
        ("resid_post:-1", "has '-1' for a layer"),
        ("resid_post:1-", "has '1-' for a layer"),
        ("resid_post:٣", "for a layer"),
        ("resid_post:7-3", "ends before it begins; write 3-7"),
        ("resid_post:0-99999999999", "the layers are 0 to 1023"),
        ("resid_post:all", "how many layers the model has is not known"),
        ("embed:0", "has layers, but a model has one such place; write embed"),
    ],
)
def test_bad_text_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=r"^sites: ") as caught:
        parse_sites(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_beyond_the_model_are_refused() -> None:
    with pytest.raises(BadInput, match="has layer 24, and the layers are 0 to 23"):
        parse_sites("resid_post:24", layers=24)
