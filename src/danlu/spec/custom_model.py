"""A custom model: any `nn.Module`, named rather than described."""

from typing import Any, Literal

from pydantic import Field

from danlu.spec.description import SpecModel
from danlu.spec.names import Label

TPStyleName = Literal["column", "row", "table", "gathered", "heads"]
"""How `tp` shards a module:

- column: a matrix sharded by outputs; what follows works on a shard
- row: the matrix after it, sharded by inputs; its result is all-reduced
- table: an embedding sharded by rows, all-reduced in the same way
- gathered: a matrix sharded by outputs, which are all-gathered, such as the output layer
- heads: a norm over single heads (`[sequence, position, head, width]`), which sees only its own rank's heads
"""


class CustomModel(SpecModel):
    """Any `nn.Module` that takes tokens (`[sequences, length]`) and returns logits (`[sequences, length, vocabulary]`).

    The module's code is not changed. Sharding its states needs nothing else; recompute, compile and a pipeline need its
    layers in a list, and `tp` a map of its matrices.
    """

    factory: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    """What builds the module: `package.module:function` (or a class), called with `arguments`."""
    path: str = "."
    """Folder to import it from, relative to the recipe; not needed for installed packages."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory. A string that begins with `./` or `../` is a path relative to the recipe."""
    name: Label = "own model"
    """Name of the model."""
    vocabulary: int = Field(ge=1, le=10**9)
    """Logits that the module returns for every position; token ids stay below it."""
    blocks: str = ""
    """Name of the module that lists the layers, such as `model.layers`; the largest list of like modules if omitted.
    """
    tensor: dict[str, TPStyleName] = Field(default_factory=dict)
    """How `tp` shards modules, by patterns over their names: `"layers.*.attention.q" = "column"`.

    If omitted, the `tp_plan` of a `transformers` model is used.
    """
    use_kernels: bool = False
    """Compute its RMS norms and gated MLPs with Danlu's operators, and experts and attention of documents and windows
    if it is a model of `transformers`. All but attention are tried before: what computes something else keeps its own
    forward, with a warning.
    """
