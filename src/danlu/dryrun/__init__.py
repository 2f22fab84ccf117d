"""One training step of any rank, without its machine: operators, collectives and live memory.

`danlu.dryrun(recipe, plan=…)` is `danlu.dryrun.api.dryrun`.
"""

import sys
from types import ModuleType
from typing import Any


class _CallableRoom(ModuleType):
    """Makes `danlu.dryrun(…)` the function: Python gives a package's name to the folder, whatever else has it."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from danlu.dryrun.api import dryrun

        return dryrun(*arguments, **options)


sys.modules[__name__].__class__ = _CallableRoom
