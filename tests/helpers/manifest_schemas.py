"""The manifests of docs/kubernetes against the schemas of Kubernetes and Kubeflow Trainer: run by test_manifests.py in
a process of its own, with .venv/kubernetes first on its path.

    python manifest_schemas.py docs/kubernetes/indexed_job.yaml ...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as trainer
import kubernetes_validate
import yaml

OLDEST, NEWEST = "1.28", "1.37"
"""The versions of Kubernetes."""
TRAINER = {
    "TrainingRuntime": trainer.TrainerV1alpha1TrainingRuntime,
    "TrainJob": trainer.TrainerV1alpha1TrainJob,
}


def check(document: dict[str, Any]) -> None:
    """Raises where it is not what the schema says, or has a field that the schema does not know."""
    model = TRAINER.get(document["kind"])
    if model is None:
        for version in (OLDEST, NEWEST):
            kubernetes_validate.validate(document, version, strict=True)
        return
    assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    read = model.from_dict(document)
    lost = list(differences(document, read.to_dict()))
    assert not lost, f"{document['kind']} has no such fields: {lost}"


def differences(given: Any, read: Any, where: str = "") -> Any:
    """Yields where a document says what the model has not taken."""
    if isinstance(given, dict) and isinstance(read, dict):
        for name, value in given.items():
            yield from differences(value, read.get(name), f"{where}.{name}")
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for at, value in enumerate(given):
            yield from differences(value, read[at], f"{where}[{at}]")
    elif given != read:
        yield f"{where}: {given!r} is read as {read!r}"


if __name__ == "__main__":
    for path in sys.argv[1:]:
        for document in yaml.safe_load_all(Path(path).read_text()):
            check(document)
    print("all as it should be")
