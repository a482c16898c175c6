"""mlflow: a run of MLflow, in its server or in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from apportion.core.event import Event
from apportion.errors import ApportionError
from apportion.reporting.logger import Log, Logger

_STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}


@final
@dataclass(frozen=True, repr=False)
class Mlflow(Logger):
    """Logs to MLflow's tracking server, or to a database or folder without one."""

    experiment: str = "apportion"
    """The name of the experiment, which is made where there is none."""
    run_name: str | None = None
    """The name of the run; None: MLflow makes one up."""
    tracking_uri: str | None = None
    """The address of the server or the database, "sqlite:///mlflow.db" or "http://host:5000"; None: as
    MLFLOW_TRACKING_URI says, or MLflow's default."""

    def open(self, run: Mapping[str, Any]) -> Log:
        try:
            from mlflow import MlflowClient
        except ModuleNotFoundError as error:
            raise ApportionError("MLflow is not installed: pip install mlflow-skinny, or mlflow") from error
        client = MlflowClient(tracking_uri=self.tracking_uri)
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found is not None else client.create_experiment(self.experiment)
        made = client.create_run(experiment, run_name=self.run_name)
        for name, value in run.items():
            if isinstance(value, str | int | float):
                client.log_param(made.info.run_id, name, value)
        return _MlflowRun(client, made.info.run_id)


@final
class _MlflowRun(Log):
    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def write(self, event: Event, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._client.log_metric(self._run_id, name, value, step=event.step)

    def close(self, reason: str) -> None:
        self._client.set_terminated(self._run_id, _STATUS.get(reason, "FAILED"))
