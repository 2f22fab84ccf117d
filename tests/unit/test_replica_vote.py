"""Who is named when replicas differ."""

from danlu.framework.replica_vote import describe_vote


def test_who_differs_from_most_is_named_and_nobody_else() -> None:
    checksums = {1: 7, 3: 7, 5: 8, 7: 7}
    assert "the state of rank 5 after step 12 is not that of its replicas, ranks 1, 3, 7" in describe_vote(
        checksums, 5, 12
    )
    assert [describe_vote(checksums, rank, 12) for rank in (1, 3, 7)] == ["", "", ""]


def test_without_a_majority_all_are_suspects() -> None:
    for checksums in ({0: 1, 1: 2}, {0: 1, 1: 1, 2: 2, 3: 2}, {0: 1, 1: 2, 2: 3}):
        for rank in checksums:
            words = describe_vote(checksums, rank, 3)
            assert f"ranks {', '.join(map(str, checksums))} must be equal after step 3" in words
            assert "set `resilience.vote` to false" in words
