"""Which steps of a gang count: those that every host has which saves at all."""

from __future__ import annotations

from penstock.server.whole_copies import candidates
from penstock.wire.agent import Saved, SavedFile

HERE = Saved(number=1)  #: a host of a gang that saves nothing, or nothing yet
BEGAN = Saved(number=2, writing=True)


def saved(number: int, *names: str) -> Saved:
    files = tuple(SavedFile(f"{name}/state", 1, 0o600, number, ()) for name in names)
    return Saved(number=number, files=files, writing=True)


def names(copies: dict[int, list[Saved]], hosts: int = 2) -> list[dict[int, list[str]]]:
    return [
        {rank: [file.path.removesuffix("/state") for file in each.files] for rank, each in whole.items()}
        for whole in candidates(copies, hosts)
    ]


def test_one_host_gives_its_lists_newest_first() -> None:
    assert names({0: [saved(3, "19", "20"), saved(2, "18", "19")]}, 1) == [{0: ["19", "20"]}, {0: ["18", "19"]}]
    assert names({0: [HERE]}, 1) == []
    assert names({}, 1) == []


def test_a_step_that_one_host_has_not_copied_does_not_count() -> None:
    assert names({0: [saved(5, "19", "20")], 1: [saved(4, "19")]}) == [{0: ["19"], 1: ["19"]}]
    assert names({0: [saved(5, "1")], 1: [BEGAN, HERE]}) == []


def test_what_newer_and_older_lists_have_in_common_is_found() -> None:
    ahead, behind = [saved(9, "19", "20"), saved(8, "18", "19")], [saved(7, "17", "18"), saved(6, "16", "17")]
    assert names({0: ahead, 1: behind}) == [{0: ["18"], 1: ["18"]}]


def test_without_a_word_of_every_host_nothing_counts() -> None:
    assert names({0: [saved(5, "20")]}) == []
    assert names({0: [saved(5, "20")], 1: []}) == []


def test_hosts_that_save_nothing_do_not_stand_in_the_way() -> None:
    assert names({0: [saved(5, "20")], 1: [HERE]}) == [{0: ["20"]}]


def test_names_may_tell_the_rank() -> None:
    for form in ("step_20_rank{}", "20-host-{}.npz", "model-0000{}-of-00002"):
        both = {rank: [saved(3, form.format(rank))] for rank in (0, 1)}
        assert names(both) == [{0: [form.format(0)], 1: [form.format(1)]}], form
        assert names({0: both[0], 1: [BEGAN]}) == [], form


def test_names_without_a_number_are_no_steps() -> None:
    assert names({0: [saved(5, "best", "20")], 1: [saved(4, "20")]}) == [{0: ["best", "20"], 1: ["20"]}]
    assert names({0: [saved(5, "best", "20")], 1: [saved(4, "19")]}) == [], "a pointer to a step that is not there"
