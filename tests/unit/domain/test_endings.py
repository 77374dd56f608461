"""Which exit of a gang explains the others: not who reported first, but whose failure is no echo."""

from penstock.domain.endings import STOPPED, explained, first_exit
from penstock.domain.nouns import Exit

GLOO = "jax.errors.JaxRuntimeError: INTERNAL: Gloo all-reduce failed: [pair.cc:547] Connection closed by peer\n"
ECHO = Exit(host=0, code=1, log_tail=f"Traceback (most recent call last):\n{GLOO}")
LEFT = Exit(host=1, code=3)
TOLD = Exit(host=2, code=143, agent=STOPPED)
WELL = Exit(host=3, code=0)


def test_an_echo_that_reports_first_is_passed_over() -> None:
    for exits in ((ECHO, LEFT), (LEFT, ECHO), (TOLD, WELL, ECHO, LEFT)):
        found = explained(exits)
        assert (found[0], first_exit(found)) == (LEFT, LEFT)
        assert sorted(found, key=exits.index) == list(exits)


def test_echoes_alone_have_to_do() -> None:
    assert first_exit(explained((WELL, ECHO, TOLD))) is ECHO
    assert explained((ECHO, Exit(host=5, code=1, log_tail=ECHO.log_tail)))[0] is ECHO


def test_who_ended_well_or_was_told_to_stop_explains_nothing() -> None:
    assert first_exit(explained(())) is None
    assert first_exit(explained((TOLD, WELL))) is None
