"""A process that saves in a loop, killed at any moment: the next one finds what was saved and goes on."""

from pathlib import Path

from killing import kill_many


def test_sixty_kills(tmp_path: Path) -> None:
    told = kill_many(tmp_path / "run", tmp_path / "staging", kills=60, seed=1)
    assert told.kills == 60 and told.saves >= 30, told
    assert told.cut_short >= 1, "no kill fell into a save: they are too late or too early to mean anything"
    assert told.most_files <= 24, "files of killed saves add up"
