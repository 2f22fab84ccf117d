"""pip's hook: compile the C parts into the source tree, from where an editable install and a wheel take them.

Without a C compiler the install succeeds, and portable code runs in their place with a warning.
"""

import runpy
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):
    """Runs before a wheel is built, also for an editable install; a source distribution has the C files."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; a wheel with libraries is for this platform, and for any Python."""
        if self.target_name != "wheel":
            return
        failures = runpy.run_path(f"{self.root}/src/danlu/native/build.py")["build"]()
        for name, reason in failures.items():
            self.app.display_warning(f"{name}.c is not compiled, and slower portable code will run instead: {reason}")
        if not failures:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
