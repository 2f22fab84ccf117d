"""First values: the same whichever piece is asked for, and normal."""

import torch
from torch import Tensor

from danlu.framework.decoder.decoder import Decoder
from danlu.framework.decoder.init_weights import _global_index, _key, _normal, init_weights
from danlu.spec.load import load_model
from danlu.spec.model import Model


def whole(shape: tuple[int, ...], key: int) -> Tensor:
    return piece(torch.Size(shape), (0,) * len(shape), shape, key)


def piece(size: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], key: int) -> Tensor:
    """What a rank computes that holds a block of `size` at `offset` of a tensor of `shape`."""
    return _normal(_global_index(torch.empty(size), offset, torch.Size(shape)), key)


def test_an_index_is_the_place_in_the_flattened_tensor() -> None:
    index = _global_index(torch.empty(2, 3), (4, 1), torch.Size((9, 5)))
    assert index.tolist() == [[21, 22, 23], [26, 27, 28]]
    assert _global_index(torch.empty(3), (2,), torch.Size((9,))).tolist() == [2, 3, 4]


def test_a_piece_holds_the_values_of_the_whole_to_the_bit() -> None:
    key = _key(7, "blocks.0.attention.q.weight")
    matrix = whole((37, 53), key)
    assert torch.equal(piece((11, 53), (26, 0), (37, 53), key), matrix[26:])
    assert torch.equal(piece((37, 13), (0, 40), (37, 53), key), matrix[:, 40:])
    assert torch.equal(piece((1, 7), (17, 3), (37, 53), key), matrix[17:18, 3:10])
    experts = whole((6, 5, 9), key)
    assert torch.equal(piece((2, 3, 9), (4, 2, 0), (6, 5, 9), key), experts[4:, 2:])


def test_values_are_normal() -> None:
    values = whole((1000, 1000), _key(0, "w")).double()
    assert abs(values.mean()) < 0.004  # four standard errors of a million values
    assert abs(values.var() - 1) < 0.006
    assert abs((values**3).mean()) < 0.01
    assert abs((values**4).mean() - 3) < 0.04
    inside = (values.abs() < 1).double().mean()
    assert abs(inside - 0.682689) < 0.002
    assert values.abs().max() < 5.8


def test_neighbours_names_and_seeds_have_nothing_in_common() -> None:
    values = whole((1000, 1000), _key(0, "w"))
    others = {
        "next in the row": values.roll(1, 1),
        "next row": values.roll(1, 0),
        "another name": whole((1000, 1000), _key(0, "v")),
        "another seed": whole((1000, 1000), _key(1, "w")),
    }
    for name, other in others.items():
        correlation = (values * other).mean()
        assert abs(correlation) < 0.005, name
        assert abs((values.square() * other.square()).mean() - 1) < 0.015, name
        assert (values == other).double().mean() < 1e-4, name


def test_a_name_and_a_seed_are_not_mixed_up() -> None:
    names = [f"blocks.{layer}.mlp.up.weight" for layer in range(2000)]
    keys = {_key(seed, name) for seed in (0, 1, 11, 2**40) for name in names}
    assert len(keys) == 4 * len(names)
    assert all(0 <= key < 2**63 for key in keys)


def filled(model: Model, seed: int = 0) -> dict[str, Tensor]:
    made = Decoder(model)
    init_weights([made], model, seed)
    return {name: parameter.detach() for name, parameter in made.named_parameters()}


def test_every_parameter_of_the_tiny_models_gets_its_own_deviation() -> None:
    for name in ("tiny-gpt", "tiny-llama", "tiny-moe"):
        model = load_model(name)
        for parameter, values in filled(model).items():
            if parameter.endswith(".bias"):
                assert (values == 0).all(), parameter
            elif "norm" in parameter:
                assert (values == 1).all(), parameter
            else:
                writes = any(parameter.endswith(end) for end in (".o.weight", ".down.weight", "experts.down"))
                expected = 0.02 / (2 * model.layers) ** 0.5 if writes else 0.02
                error = 4 * expected / (2 * values.numel()) ** 0.5  # four standard errors of a deviation
                assert abs(values.std() - expected) < error, parameter


def test_a_seed_is_a_model_and_another_seed_another() -> None:
    model = load_model("tiny-moe")
    first, again, other = filled(model), filled(model), filled(model, seed=1)
    for name, values in first.items():
        assert torch.equal(values, again[name])
        assert torch.equal(values, other[name]) == (values.ndim == 1), name


def test_a_stage_gets_the_values_of_the_whole_model() -> None:
    model = load_model("tiny-moe")
    everything = filled(model)
    stage = Decoder(model, [2, 3], first=False, last=True)
    init_weights([stage], model, 0)
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, everything[name]), name


def test_buffers_left_empty_by_a_meta_build_are_cleared() -> None:
    model = load_model("tiny-moe")
    made = Decoder(model)
    for buffer in made.buffers():
        buffer.fill_(float("nan"))
    init_weights([made], model, 0)
    assert all((buffer == 0).all() for buffer in made.buffers())
    assert list(made.buffers()), "the model has buffers at all"
