"""The manifest for Kubeflow Trainer v2 against its API's models, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

MANIFEST = Path(__file__).resolve().parents[2] / "packaging" / "kubernetes" / "trainjob.yaml"


def kept(given: Any, read: Any) -> bool:
    """True if all that was written is what the models have read: they drop what they don't know."""
    if isinstance(given, dict):
        return isinstance(read, dict) and all(kept(v, read.get(k)) for k, v in given.items())
    if isinstance(given, list):
        return len(given) == len(read) and all(map(kept, given, read))
    return bool(given == read)


@pytest.mark.long
def test_the_manifest_is_what_trainer_takes() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML isn't installed")
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api isn't installed"
    )
    runtime, job, _ = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    for text, model in (
        (runtime, models.TrainerV1alpha1TrainingRuntime),
        (job, models.TrainerV1alpha1TrainJob),
    ):
        read = model.from_dict(text).to_dict()
        assert kept(text, read), read
        assert not kept({**text, "spec": {**text["spec"], "mistyped": 1}}, read)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
