"""Unix accounts for the time of a test, and commands that run as one of them."""

import os
import pwd
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).parents[2] / "src"
_OPEN = 0o755


@dataclass(frozen=True)
class Account:
    """An account with a folder of its own, which others may look into."""

    name: str
    folder: Path

    @property
    def number(self) -> int:
        """The account's user id."""
        return pwd.getpwnam(self.name).pw_uid

    def command(self, *arguments: str) -> list[str]:
        """What to start for Python to run as this account, which may not be let into the folder Python lies in."""
        words = [sys.executable, *arguments]
        drop = ["setpriv", f"--reuid={self.number}", f"--regid={self.number}", "--clear-groups", *words]
        return ["unshare", "--mount", "sh", "-ec", f"{_reachable()}exec {shlex.join(drop)}"]

    @property
    def environment(self) -> dict[str, str]:
        """What the account has in its environment."""
        return os.environ | {
            "HOME": str(self.folder), "USER": self.name, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join([str(_SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }  # fmt: skip

    def danlu(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of danlu in the account's folder."""
        return subprocess.run(
            self.command("-m", "danlu", *arguments),
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=360,
        )  # fmt: skip


@contextmanager
def made_accounts(count: int) -> Iterator[list[Account]]:
    """New accounts of this machine, gone afterwards with all that they own here."""
    root = Path(tempfile.mkdtemp(prefix="danlu-accounts-"))
    root.chmod(_OPEN)
    made: list[Account] = []
    try:
        for number in range(count):
            account = Account(f"danlu{os.getpid() % 100_000}{'abcd'[number]}", root / f"{number}")
            subprocess.run(["useradd", "--no-create-home", "--user-group", account.name], check=True)
            made.append(account)
            account.folder.mkdir(mode=_OPEN)
            os.chown(account.folder, account.number, account.number)
        yield made
    finally:
        for account in made:
            shutil.rmtree(f"/dev/shm/danlu-{account.number}", ignore_errors=True)
            subprocess.run(["userdel", account.name], check=True)
        shutil.rmtree(root)


def _reachable() -> str:
    """Shell lines that make Python and this source reachable in a mount namespace where some folder above is closed."""
    needed = {Path(place).resolve() for place in (sys.base_prefix, sys.prefix, _SOURCE)}
    needed |= {Path(place).resolve() for place in sys.path if place and Path(place).is_dir()}
    closed = {above for place in needed for above in place.parents if not above.stat().st_mode & 1}
    tops = sorted(place for place in closed if not closed & set(place.parents))
    lines = []
    for top in tops:
        inside = sorted(place for place in needed if top in place.parents)
        inside = [place for place in inside if not set(inside) & set(place.parents)]
        holds = {shlex.quote(str(place)): f"/mnt/danlu-{number}" for number, place in enumerate(inside)}
        lines += ["mount -t tmpfs tmpfs /mnt"]
        lines += [f"mkdir -p {hold}; mount --bind {place} {hold}" for place, hold in holds.items()]
        lines += [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(top))}"]
        lines += [f"mkdir -p {place}; mount --bind {hold} {place}" for place, hold in holds.items()]
    return "".join(f"{line}\n" for line in lines)
