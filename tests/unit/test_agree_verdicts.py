"""The decisions of an agreement and their texts, without ranks; `tests/integration/test_agree.py` has those."""

import pytest

from steelyard.agree.verdicts import (
    Decision,
    Limits,
    Seat,
    Verdict,
    Word,
    beat,
    judge_absence,
    judge_failures,
    judge_silence,
    judge_words,
    text_of,
)
from steelyard.errors import CheckpointError

LIMITS = Limits(60.0)


def seats(*beats, now=0.0):
    """Return seats that have taken in one heartbeat each: (beats, progress, arrived, failed, left)."""
    made = [Seat(0.0) for _ in beats]
    for seat, values in zip(made, beats, strict=True):
        seat.update(beat(*values).encode(), now)
    return made


def words(*verdicts, stage="plan", gather=False):
    return [Word(stage, gather, verdict) for verdict in verdicts]


def test_times_follow_from_the_bound():
    """O-03: a death is found, decided and read within the bound: silence and two intervals."""
    for bound in (1.0, 5.0, 60.0, 600.0):
        limits = Limits(bound)
        assert limits.silence + 2 * limits.interval <= bound
        assert limits.interval <= 1.0
    assert (LIMITS.interval, LIMITS.silence, LIMITS.linger) == (1.0, 40.0, 10.0)


@pytest.mark.parametrize(
    "record",
    [Word("plan", True, Verdict(False, "d", {"é": "\n"}, "e")), Decision("why", 3, ("a", "b")), Decision()],
    ids=["word", "failure", "well"],
)
def test_records_survive_the_wire(record):
    assert type(record).decode(record.encode().encode()) == record


def test_a_failure_is_told_with_its_type_unless_it_is_ours():
    assert text_of(OSError("disk")) == "OSError: disk"
    assert text_of(MemoryError()) == "MemoryError"
    assert text_of(CheckpointError("no weights")) == "no weights"
    assert text_of(KeyboardInterrupt()) == "interrupted (KeyboardInterrupt)"
    assert text_of(OSError("x" * 9000)).endswith("x... (9009 characters)")


def test_many_different_failures_are_counted():
    error = judge_failures({rank: f"e{rank}" for rank in range(13)}).error()
    assert error is not None
    assert error.rank == 0
    assert str(error) == (
        "rank 0: e0; rank 1: e1; rank 2: e2; rank 3: e3; rank 4: e4; rank 5: e5; rank 6: e6; rank 7: e7; "
        "rank 8: e8; rank 9: e9; rank 10: e10; 2 further failures"
    )


def test_silence_counts_from_the_last_heartbeat_that_changed():
    found = seats((5, 0, 0, False, False), (5, 0, 0, False, False))
    found[0].update(beat(6, 0, 0, False, False).encode(), 39.0)
    found[1].update(beat(5, 9, 1, False, False).encode(), 39.0)
    assert judge_silence(found, 40.0, LIMITS) is None
    assert judge_silence(found, 40.5, LIMITS) == Decision(
        "no heartbeat for 40 s: the process was killed or stopped, or its machine is out of reach", 1
    )


def test_a_rank_that_has_not_joined_has_the_whole_bound():
    found = seats((1, 0, 0, False, True), (0, 0, 0, False, False), (0, 0, 0, False, False))
    assert judge_silence(found, 59.0, LIMITS) is None
    assert judge_silence(found, 61.0, LIMITS) == Decision("ranks 1, 2: did not join the load within 60 s")


def test_only_a_rank_without_signs_of_life_is_stuck():
    found = seats((1, 1, 1, False, False), (1, 0, 0, False, False), (1, 0, 0, False, False))
    found[1].update(beat(50, 7, 0, False, False).encode(), 50.0)
    found[2].update(beat(50, 0, 0, False, False).encode(), 50.0)
    assert judge_absence(found, 0, "plan", 60.0, LIMITS) is None
    assert judge_absence(found, 0, "plan", 61.0, LIMITS) == Decision("did not answer within 60 s at 'plan'", 2)


def test_waiting_counts_from_the_first_arrival():
    """A stage that begins long after the load did is not late."""
    found = seats((1, 0, 1, False, False), (1, 0, 0, False, False), now=1000.0)
    assert judge_absence(found, 0, "loaded", 1059.0, LIMITS) is None
    assert judge_absence(found, 0, "loaded", 1061.0, LIMITS) is not None


def test_equal_words_are_well():
    same = Verdict(digest="d", choices={"a": "1"})
    assert judge_words(words(same, same, same)) == Decision()


def test_gathered_words_may_differ():
    told = words(Verdict(digest="a"), Verdict(ok=False, error="b"), gather=True)
    assert judge_words(told) == Decision(words=tuple(word.encode() for word in told))


def test_digests_that_begin_alike_are_printed_whole():
    decision = judge_words(words(Verdict(digest="a" * 12 + "b"), Verdict(digest="a" * 12 + "c")))
    assert decision.why == (
        "the ranks do not agree at 'plan': digest aaaaaaaaaaaab on rank 0, aaaaaaaaaaaac on rank 1. "
        "Every rank needs the same checkpoint files, options and plugin versions"
    )


def test_many_differing_choices_are_counted():
    one, two = ({f"c{index:02}": value for index in range(12)} for value in "xy")
    why = judge_words(words(Verdict(choices=one), Verdict(choices=two))).why
    assert why is not None
    assert "c09 is 'x' on rank 0, 'y' on rank 1; 2 further choices differ. Every" in why
