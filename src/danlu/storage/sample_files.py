"""Samples of text in a run's folder."""

from pathlib import Path

from danlu.spec.run_folder import RunFolder
from danlu.spec.samples import SampleSet
from danlu.storage.store.atomic_files import atomic_replace, make_dirs_durable


def write_samples(run: RunFolder, samples: SampleSet) -> Path:
    """Write samples to a file of the run's folder; those of the same step and request are replaced."""
    make_dirs_durable(run.samples)
    path = run.samples / samples.file_name
    atomic_replace(path, samples.model_dump_json(indent=2) + "\n")
    return path
