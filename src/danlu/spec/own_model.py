"""A model of the user's own: any `nn.Module`, named rather than described."""

from typing import Any, Literal

from pydantic import Field

from danlu.spec.description import Count, Description

TensorStyle = Literal["column", "row", "table", "gathered", "heads"]
"""How the ranks of `tp` share a module:

- column: a matrix split by outputs; whatever follows works on a part of them
- row: the matrix after it, split by inputs; its result is summed, so that every rank has the whole again
- table: an embedding split by rows, summed in the same way
- gathered: a matrix split by outputs which are collected again, such as the one that scores the vocabulary
- heads: a norm over single heads (`[sequence, position, head, width]`), which sees only its own rank's heads
"""


class OwnModel(Description):
    """Any `nn.Module` that takes tokens (`[sequences, length]`) and returns scores (`[sequences, length, vocabulary]`).

    The module stays as it is. Sharding its states needs nothing else; recompute, compile and a pipeline want its layers
    in a list, and `tp` a map of its matrices.
    """

    factory: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    """What makes the module: `package.module:function` (or a class), called with `arguments`."""
    path: str = "."
    """Folder to import it from, relative to the recipe; installed packages are found without."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    name: str = "own model"
    vocabulary: Count
    """Scores that the module gives for every position; token ids stay below it."""
    blocks: str = ""
    """Name of the module that lists the layers, such as `model.layers`; the largest list of like modules when left out.
    """
    tensor: dict[str, TensorStyle] = Field(default_factory=dict)
    """How `tp` shares modules, by patterns over their names: `"layers.*.attention.q" = "column"`.

    When left out, a `transformers` model's own `tp_plan` is used.
    """
