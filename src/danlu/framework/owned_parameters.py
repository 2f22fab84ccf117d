"""The parameters that a rank owns: all that it holds, but copies of another pipeline stage's."""

from collections.abc import Iterator

from torch import Tensor, nn

from danlu.framework.decoder.decoder import EmbedCopy


def owned_parameters(stage_module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of a stage module that an optimizer moves and a checkpoint saves, by global name."""
    copied = _copied(stage_module)
    return ((name, each) for name, each in stage_module.named_parameters() if not name.startswith(copied))


def owned_tensors(stage_module: nn.Module) -> dict[str, Tensor]:
    """The same of its state dict, which has buffers too: the tensors themselves, not detached ones."""
    copied, tensors = _copied(stage_module), stage_module.state_dict(keep_vars=True)  # detaching takes a DTensor 30 µs
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(copied)}


def copied_parameters(stage_module: nn.Module) -> list[nn.Parameter]:
    """The others: copies of parameters that another stage owns."""
    copied = _copied(stage_module)
    return [each for name, each in stage_module.named_parameters() if copied and name.startswith(copied)]


def _copied(stage_module: nn.Module) -> tuple[str, ...]:
    return tuple(f"{name}." for name, module in stage_module.named_modules() if isinstance(module, EmbedCopy))
