"""What is done about a fault: the newest state is kept, and no sequence of faults makes a run restart forever."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.resilience.policy import (
    Decision,
    Fault,
    FaultKind,
    Means,
    Replace,
    Replan,
    Restore,
    Retry,
    Shrink,
    Stop,
    decide,
    excluded_hosts,
    quarantined_steps,
)


def fault(step: int, kind: FaultKind = "killed", ranks: tuple[int, ...] = (1,), host: str = "") -> Fault:
    return Fault(0.0, ranks, kind, step, f"{kind} at {step}", host)


def test_a_rank_that_dies_is_replaced_and_the_others_keep_their_processes() -> None:
    assert decide([fault(7)], Means()) == Replace((1,), "memory")


def test_connections_that_break_are_made_again_by_the_same_processes() -> None:
    assert decide([fault(7, "network", ())], Means()) == Retry("memory")


def test_a_second_fault_before_a_new_step_starts_all_processes_anew() -> None:
    assert decide([fault(7), fault(7)], Means()) == Restore("memory")
    assert decide([fault(7), fault(6)], Means()) == Restore("memory"), "a repeated step is not a new one"
    assert decide([fault(7), fault(8)], Means()) == Replace((1,), "memory")


def test_faults_that_lead_nowhere_end_the_run() -> None:
    found = decide([fault(7)] * 3, Means(), max_faults=3)
    assert isinstance(found, Stop) and found.reason.startswith("3 faults without a new step since step 7")


def test_an_error_that_explains_itself_is_not_tried_again() -> None:
    assert decide([fault(7, "explained")], Means()) == Stop("explained at 7")


def test_a_batch_on_which_the_program_fails_twice_is_passed_over() -> None:
    failures = [fault(7, "exception")] * 2
    assert decide(failures[:1], Means()) == Replace((1,), "memory")
    assert decide(failures, Means()) == Replace((1,), "memory")
    assert quarantined_steps(failures[:1]) == ()
    assert quarantined_steps(failures) == (7,)


def test_a_batch_that_is_passed_over_stays_so_whatever_comes() -> None:
    faults = [*[fault(7, "exception")] * 2, fault(20, "host", (4, 5), "n2")]
    assert isinstance(decide(faults, Means(hosts=("n1",), smaller_plan="{}")), Replan)
    assert quarantined_steps(faults) == (7,)


def test_the_newest_state_there_is_is_used() -> None:
    tiers = [decide([fault(7)], Means(memory=memory, checkpoint=saved)) for memory, saved in ((1, 1), (0, 1), (0, 0))]
    assert tiers == [Replace((1,), "memory"), Replace((1,), "checkpoint"), Replace((1,), "start")]


def test_a_lost_host_is_replaced_by_a_spare_then_by_fewer_replicas_then_by_another_layout() -> None:
    lost = [fault(7, "host", (4, 5), host="n2")]
    assert decide(lost, Means(spare_hosts=("n9",))) == Replace((4, 5), "memory", spare="n9")
    assert decide(lost, Means(hosts=("n1", "n2"))) == Replace((4, 5), "memory"), "it answers again"
    assert decide(lost, Means(hosts=("n1",), smaller_plan="{}", replicas=3)) == Shrink(3, "memory")
    assert decide(lost, Means(hosts=("n1",), smaller_plan="{}")) == Replan(("n1",), "memory")
    assert isinstance(decide(lost, Means(hosts=("n1",))), Stop)


def test_a_host_that_failed_twice_is_not_used_again() -> None:
    twice = [fault(7, "host", (4,), "n2"), fault(9, "hang", (4,), "n2")]
    assert excluded_hosts(twice) == {"n2"}
    assert decide(twice, Means(spare_hosts=("n2", "n3"))) == Replace((4,), "memory", spare="n3")
    assert decide(twice, Means(hosts=("n1", "n2"), smaller_plan="{}")) == Replan(("n1",), "memory")


KINDS: tuple[FaultKind, ...] = ("killed", "exception", "hang", "network", "host")


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 6), st.sampled_from([(), ("s1",), ("s1", "s2")]))
def test_a_run_ends_whatever_happens(random: Random, limit: int, spares: tuple[str, ...]) -> None:
    """Faults at random, at every moment: the run does all its steps or stops, after a bounded number of decisions."""
    steps, done, faults = 30, 0, list[Fault]()
    means = Means(spare_hosts=spares, hosts=("n1", "n2"), smaller_plan="{}")
    for _ in range(steps * (limit + 3) + 1):
        done += random.choice([0, 0, 0, 1, 5])  # steps until the next fault; the state is in memory after each
        if done >= steps:
            return
        kind = random.choice(KINDS)
        ranks = () if kind == "network" else (random.randrange(8),)
        faults.append(
            Fault(0.0, ranks, kind, done, "", random.choice(["n1", "n2"]) if kind in ("host", "hang") else "")
        )
        decision: Decision = decide(faults, means, limit)
        if isinstance(decision, Stop):
            return
        assert decision.tier == "memory", "the newest good state is never left while it exists"
        if isinstance(decision, Replace):
            assert decision.ranks == ranks and decision.spare not in excluded_hosts(faults)
            done += done in quarantined_steps(faults)  # its batch is passed over
    raise AssertionError("the run neither ended nor stopped")
