"""Rules of the `[spikes]` of a recipe: a policy that can be carried out, and no setting that it ignores."""

from collections.abc import Iterator

from danlu.spec.load import ParsedSpec
from danlu.spec.problem import Problem
from danlu.spec.recipe import Recipe
from danlu.spec.spikes import SpikeConfig


def spike_settings_are_used(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """No setting is given that the policy ignores."""
    spikes, default = recipe.value.spikes, SpikeConfig()
    if spikes.policy != "rewind":
        for key in ("rewind", "max_rewinds"):
            if (value := getattr(spikes, key)) is not None:
                yield recipe.problem(
                    f"spikes.{key}",
                    f'is {value}, but the policy "{spikes.policy}" never rewinds',
                    'remove it, or set `policy = "rewind"`',
                )
    if spikes.policy == "off":
        for key in ("window", "threshold"):
            if (value := getattr(spikes, key)) != getattr(default, key):
                yield recipe.problem(
                    f"spikes.{key}",
                    f'is {value}, but with the policy "off" nothing looks for spikes',
                    'remove it, or set `policy = "warn"`',
                )


def rewind_has_a_checkpoint(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """With the policy `rewind` a checkpoint that is old enough is always kept."""
    spikes, saves = recipe.value.spikes, recipe.value.checkpoint
    if spikes.policy != "rewind":
        return
    if not saves.every:
        yield recipe.problem(
            "spikes.policy",
            'is "rewind", but the run saves no checkpoint before its end that it could go back to',
            "`every = 100` under [checkpoint], or another number of steps",
        )
        return
    back = spikes.rewind or saves.every
    oldest = (saves.keep - 1) * saves.every  # right after a save; a checkpoint that is so old is always kept
    if back > oldest:
        keep = f"`keep = {1 + -(-back // saves.every)}` under [checkpoint]"
        value = str(back) if spikes.rewind else f'"rewind", which goes back {back} steps'
        yield recipe.problem(
            "spikes.rewind" if spikes.rewind else "spikes.policy",
            f"is {value}, but of {saves.keep} kept checkpoints, one every {saves.every} steps, the oldest may be only "
            f"{oldest} steps old",
            f"rewind = {oldest} at most, or {keep}" if spikes.rewind and oldest else keep,
        )


def spikes_can_be_found(recipe: ParsedSpec[Recipe]) -> Iterator[Problem]:
    """A run that acts on spikes is long enough to learn what is usual."""
    spikes, steps = recipe.value.spikes, recipe.value.steps
    if spikes.policy in ("skip", "rewind") and steps <= spikes.steps_to_learn:
        yield recipe.problem(
            "spikes.policy",
            f'is "{spikes.policy}", but the first {spikes.steps_to_learn} steps are needed to learn what is usual, and '
            f"the run has only {steps}",
            "a smaller `window`, or remove [spikes]",
        )


SPIKE_RULES = (spike_settings_are_used, rewind_has_a_checkpoint, spikes_can_be_found)
