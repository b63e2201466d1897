"""Agreement over real processes (X-03): who failed is said by every rank, with one text and in time.

Every run has a time limit. Numbers in the texts are exact; only times are compared with `<`.
"""

import threading

import pytest

from steelyard.agree import Agreement, Verdict
from steelyard.errors import ConfigError, DistributedLoadError
from steelyard.ranks import Ranks
from support import ranks_agree

HERE = "support.ranks_agree"
BOUND = 5.0
LIMIT = 60.0
KILLED = "the process was killed or stopped, or its machine is out of reach"
ALIKE = "Every rank needs the same checkpoint files, options and plugin versions"


@pytest.fixture
def failures(rank_pool):
    """Return a function that runs a worker function and returns (text, seconds) of each rank's error."""

    def run(function, *args, world=2):
        outcomes = rank_pool.run(f"{HERE}:{function}", world, (*args, BOUND), timeout=LIMIT)
        assert [item.kind for item in outcomes] == ["DistributedLoadError"] * world, outcomes
        return [(item.text, item.seconds) for item in outcomes]

    return run


def one_text(found):
    """Return the text that all ranks raised."""
    texts = {text for text, _ in found}
    assert len(texts) == 1, texts
    return texts.pop()


# --- all is well ---


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_agree_load_without_delay(rank_pool, world):
    """L-06: reading takes 0.3 s, the agreement little beside it."""
    seconds = rank_pool.values(f"{HERE}:good", world, (BOUND,), timeout=LIMIT)
    assert len(seconds) == world
    assert max(seconds) < 3


def test_one_rank_that_cannot_sends_all_to_the_same_method(rank_pool):
    """L-06, R168: `fastsafetensors` importable on rank 0 only, `auto`: both take scratch, in less than 30 s."""
    found = rank_pool.values(f"{HERE}:choose_method", 2, (0, 30.0), timeout=30)
    assert [method for method, _ in found] == ["scratch", "scratch"]


def test_gathered_verdicts_may_differ_and_come_in_rank_order(rank_pool):
    said = [Verdict(digest="a"), Verdict(ok=False, error="no"), Verdict(choices={"é": "\n"})]
    assert rank_pool.values(f"{HERE}:gathers", 3, (said, BOUND), timeout=LIMIT) == [tuple(said)] * 3


def test_a_rank_that_makes_progress_may_take_longer_than_the_bound(rank_pool):
    """O-03: only silence counts, not how long a rank reads."""
    seconds = rank_pool.values(f"{HERE}:slow", 2, (1, 2.0), timeout=LIMIT)
    assert min(seconds) > 2.5


def test_polling_costs_next_to_nothing(rank_pool):
    assert max(rank_pool.values(f"{HERE}:poll_cost", 2, (20_000,), timeout=LIMIT)) < 100e-6


# --- a rank fails ---


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("where", ["start", "reading", "end"])
def test_a_failing_rank_fails_all_with_one_text(failures, where, world):
    """L-07: OSError("disk") on rank 1 before the first stage, between two reads, before the last stage."""
    found = failures("raises", 1, where, world=world)
    assert one_text(found) == "rank 1: OSError: disk"
    assert max(seconds for _, seconds in found) < BOUND


def test_the_failing_rank_keeps_its_own_error_as_the_cause(rank_pool):
    _, outcome = rank_pool.run(f"{HERE}:raises", 2, (1, "start", BOUND), timeout=LIMIT)
    assert "in raise_disk" in outcome.trace
    assert "The above exception was the direct cause" in outcome.trace


def test_a_failing_host_fails_all(failures):
    """L-07: also where the rank that holds the store is the one that fails."""
    found = failures("raises", 0, "start")
    assert one_text(found) == "rank 0: OSError: disk"
    assert max(seconds for _, seconds in found) < BOUND


def test_ranks_that_fail_alike_are_named_together(failures):
    assert one_text(failures("all_raise", world=3)) == "ranks 0-2: OSError: disk"


def test_ranks_that_fail_apart_are_each_named(failures):
    assert one_text(failures("raise_apart", world=3)) == (
        "rank 0: KeyError: 'tensor of 0'; rank 1: OSError: disk; rank 2: KeyError: 'tensor of 2'"
    )


def test_a_rank_that_is_not_allowed_is_named_with_its_numbers(failures):
    """L-05: free 14, share 15 on rank 1 of an explicit request."""
    found = failures("says_no", 1)
    assert one_text(found) == "rank 1: not allowed: free 14 GiB, share 15 GiB"


def test_a_failure_behind_the_last_stage_is_the_failing_ranks_own(rank_pool):
    outcomes = rank_pool.run(f"{HERE}:fails_after_the_end", 2, (1, BOUND), timeout=LIMIT)
    assert [(item.kind, item.text) for item in outcomes] == [
        ("", ""),
        ("DistributedLoadError", "rank 1: OSError: disk"),
    ]


@pytest.mark.parametrize("who", [0, 1])
def test_an_interrupted_rank_is_named_by_the_others_and_stays_interrupted(rank_pool, who):
    outcomes = rank_pool.run(f"{HERE}:interrupted", 2, (who, BOUND), timeout=LIMIT)
    assert outcomes[who].kind == "KeyboardInterrupt"
    other = outcomes[1 - who]
    assert (other.kind, other.text) == (
        "DistributedLoadError",
        f"rank {who}: interrupted (KeyboardInterrupt)",
    )
    assert max(item.seconds for item in outcomes) < BOUND


# --- a rank is gone ---


@pytest.mark.parametrize("where", ["start", "reading"])
def test_a_killed_rank_is_named_within_the_bound(rank_pool, where):
    """L-07, R170, O-04: SIGKILL on rank 1 of 3, at the first stage and while all read."""
    bound = 3.0
    first, died, last = rank_pool.run(f"{HERE}:dies", 3, (1, where, bound), timeout=LIMIT)
    assert (died.kind, died.text.splitlines()[0]) == ("Died", "signal SIGKILL")
    for outcome in (first, last):
        assert outcome.kind == "", outcome
        text, rank, seconds = outcome.value
        assert (text, rank) == (f"rank 1: no heartbeat for 2 s: {KILLED}", "1")
        assert seconds < {"start": 0, "reading": 0.5}[where] + bound


@pytest.mark.parametrize("where", ["start", "reading"])
def test_the_loss_of_the_stores_host_is_the_loss_of_rank_0(rank_pool, where):
    """O-04: the store dies with rank 0, and the survivors say so with one text, also if they could not join yet."""
    died, *others = rank_pool.run(f"{HERE}:dies", 3, (0, where, BOUND), timeout=LIMIT)
    assert died.kind == "Died"
    for outcome in others:
        text, _, seconds = outcome.value
        assert text == (
            f"rank 0: {KILLED}: the store through which the ranks agree, which this rank holds, does not answer"
        )
        assert seconds < BOUND


@pytest.mark.parametrize("who", [0, 1])
def test_a_stopped_rank_is_named_within_the_bound(rank_pool, who):
    """R170, O-03: a machine that hangs closes no connection; the store's host included."""
    bound = 2.0
    outcomes = rank_pool.run(f"{HERE}:stops", 2, (who, 2.5, bound), timeout=LIMIT)
    text, seconds = outcomes[1 - who].value
    assert text.startswith(f"rank {who}: ")
    assert KILLED in text
    assert seconds < 0.5 + bound


@pytest.mark.parametrize("when", ["reading", "waiting"])
def test_a_job_that_is_stopped_as_a_whole_goes_on_when_it_is_woken(rank_pool, when):
    """A rank that did not watch for a while does not take the others for dead."""
    assert min(rank_pool.values(f"{HERE}:all_stop_{when}", 3, (2.0, 2.0), timeout=LIMIT)) > 2


@pytest.mark.parametrize("who", [0, 1])
def test_a_stuck_rank_is_named(rank_pool, who):
    """R170, O-03: it lives and its heart beats, but it never comes to the stage at which the other waits."""
    outcomes = rank_pool.run(f"{HERE}:stuck", 2, (who, "start", 2.0), timeout=LIMIT)
    assert {item.text for item in outcomes} == {f"rank {who}: did not answer within 2 s at 'plan'"}
    assert 2 <= outcomes[1 - who].seconds < 3


def test_a_rank_that_leaves_early_is_named(rank_pool):
    outcomes = rank_pool.run(f"{HERE}:leaves", 3, (1, BOUND), timeout=LIMIT)
    assert [(item.kind, item.text) for item in (outcomes[0], outcomes[2])] == [
        ("DistributedLoadError", "rank 1: left the load before 'loaded'")
    ] * 2


def test_a_rank_that_never_joins_is_named(rank_pool):
    outcomes = rank_pool.run(f"{HERE}:never_opens", 3, (2, 2.0), timeout=LIMIT)
    assert [(item.kind, item.text) for item in outcomes] == [
        ("DistributedLoadError", "rank 2: did not join the load within 2 s"),
        ("DistributedLoadError", "rank 2: did not join the load within 2 s"),
        ("", ""),
    ]


def test_a_host_that_never_opens_is_named(rank_pool):
    outcomes = rank_pool.run(f"{HERE}:never_opens", 2, (0, 2.0), timeout=LIMIT)
    assert outcomes[1].text == "rank 0: did not open the agreement of this load within 2 s"


# --- ranks disagree ---


def test_differing_digests_name_the_ranks(failures):
    said = [Verdict(digest="a" * 64), Verdict(digest="b" * 64), Verdict(digest="a" * 64)]
    assert one_text(failures("says", said, world=3)) == (
        "the ranks do not agree at 'plan': digest aaaaaaaaaaaa on ranks 0, 2, bbbbbbbbbbbb on rank 1. " + ALIKE
    )


def test_differing_choices_are_named(failures):
    """L-06: what differs is said by name, and what is equal is not."""
    said = [
        Verdict(digest="d", choices={"load_method": "scratch", "kernel fp8.plain": "torch", "same": "x"}),
        Verdict(digest="d", choices={"load_method": "fastsafetensors", "same": "x"}),
    ]
    assert one_text(failures("says", said)) == (
        "the ranks do not agree at 'plan': kernel fp8.plain is 'torch' on rank 0, absent on rank 1; "
        "load_method is 'scratch' on rank 0, 'fastsafetensors' on rank 1. " + ALIKE
    )


def test_ranks_at_different_stages_are_told(failures):
    assert one_text(failures("other_stage")) == (
        "the ranks are at different stages: 'loaded' on rank 0, 'plan' on rank 1"
    )


# --- one process, many loads ---


@pytest.mark.parametrize("fail", [False, True], ids=["well", "failing"])
def test_loads_in_one_process_leave_nothing_behind(rank_pool, fail):
    """No thread, no socket, and no load takes another one's store."""
    assert rank_pool.values(f"{HERE}:leftovers", 2, (3, BOUND, fail), timeout=LIMIT) == [(0, 0, [])] * 2


def test_a_load_works_after_loads_that_one_rank_missed_or_broke(rank_pool):
    found = rank_pool.values(f"{HERE}:retries", 2, (2.0,), timeout=LIMIT)
    assert [text for text, _, _ in found] == [
        "rank 1: did not join the load within 2 s; rank 1: OSError: disk",
        "rank 1: OSError: disk",
    ]


def test_a_stranger_at_the_stores_port_disturbs_nobody(rank_pool):
    rank_pool.values(f"{HERE}:beside_a_stranger", 2, (BOUND,), timeout=LIMIT)


# --- one rank alone, and refusals ---


def test_one_rank_agrees_with_itself():
    before = threading.active_count()
    with Agreement.open(Ranks()) as agreement:
        agreement.poll()
        agreement.settle("plan", ranks_agree.SAME)
        assert agreement.gather("method", ranks_agree.SAME) == (ranks_agree.SAME,)
        assert threading.active_count() == before


def test_one_rank_keeps_its_own_error():
    with pytest.raises(OSError, match="disk"), Agreement.open(Ranks()):
        ranks_agree.raise_disk()
    with pytest.raises(DistributedLoadError, match="^rank 0: no$"), Agreement.open(Ranks()) as agreement:
        agreement.settle("plan", Verdict(ok=False, error="no"))


def test_several_ranks_need_torch_distributed():
    with pytest.raises(ConfigError) as caught:
        Agreement.open(Ranks.of(tp=2))
    assert str(caught.value) == (
        "world=2, but torch.distributed is not initialised: start the ranks with torchrun and call "
        "torch.distributed.init_process_group first"
    )


def test_ranks_that_torch_distributed_contradicts_are_refused(rank_pool):
    outcomes = rank_pool.run(f"{HERE}:wrong_ranks", 2, (BOUND,), timeout=LIMIT)
    assert [(item.kind, item.text) for item in outcomes] == [
        (
            "ConfigError",
            f"world=3, rank={rank} were asked for, but torch.distributed says world=2, rank={rank}",
        )
        for rank in range(2)
    ]


@pytest.mark.parametrize("bound", [0, -1.0])
def test_a_bound_is_a_positive_time(bound):
    with pytest.raises(ConfigError) as caught:
        Agreement.open(Ranks(), bound=bound)
    assert str(caught.value) == f"bound={bound:g}: an agreement needs a positive number of seconds"
