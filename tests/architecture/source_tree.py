"""Where things stand in this repository: its root, its tracked files, its rooms."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "danlu"


def tracked_files(new: bool = False) -> list[Path]:
    """Every file git tracks, relative to the root, and `new` ones it does not ignore; deleted ones are left out."""
    command = ["git", "ls-files", "-z", "--cached", *(["--others", "--exclude-standard"] if new else [])]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listing.split("\0") if name and (ROOT / name).is_file()]


def rooms(package: Path = PACKAGE) -> list[str]:
    """Names of the folders in the package that hold any Python."""
    return sorted(folder.name for folder in package.iterdir() if folder.is_dir() and any(folder.rglob("*.py")))


def source_files() -> list[Path]:
    """Every Python file of the package."""
    return sorted(PACKAGE.rglob("*.py"))
