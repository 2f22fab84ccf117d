"""`--json` is JSON for every parser."""

import json
from math import inf, nan
from typing import Any

import pytest

from danlu.cli.json_output import print_json


def refuse(constant: str) -> Any:
    raise ValueError(constant)


def test_numbers_that_json_lacks_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"loss": nan, "data": [{"perplexity": inf, "tokens": 3}, (-inf, 1.5, "步")]}
    print_json(value)
    shown = capsys.readouterr().out
    assert json.loads(shown, parse_constant=refuse) == {
        "loss": None,
        "data": [{"perplexity": None, "tokens": 3}, [None, 1.5, "步"]],
    }
    print_json(value, indent=None)
    assert capsys.readouterr().out.count("\n") == 1
