"""Gradients that no weights of the ranks make equal: something takes statistics of a rank's own rows."""

from __future__ import annotations

from apportion.script_check.comparison.causes import weighting
from apportion.script_check.comparison.evidence import Evidence
from apportion.script_check.findings import Finding
from apportion.script_check.record import Event, RankRecord


def suspected(evidence: Evidence) -> bool:
    """Whether the gradient of one process is not a weighted sum of the ranks' own ones, so that a pass which splits the
    rows in each module can show the reason."""
    if evidence.found.what != "gradients" or not evidence.reference:
        return False
    if weighting.differs_by_micro_batch(evidence):
        return False
    known, wanted = any(evidence.own_gradients), evidence.weights_in_reference
    return not known or wanted.residual > 1e-7 or bool(wanted.left_out)  # such as by a loss of the largest row


def modules(split: RankRecord) -> tuple[str, ...]:
    """Returns the modules that mix rows, without those that only contain such a module."""
    found = list(dict.fromkeys(str(event["module"]) for event in split.events_of("mixes_rows")))
    return tuple(name for name in found if not any(other.startswith(f"{name}.") for other in found))


def cause(evidence: Evidence) -> Finding | None:
    """Returns the finding that a module or the loss takes statistics of one rank's rows."""
    if evidence.split is None or not suspected(evidence):
        return None
    names = evidence.shown(evidence.found.names)
    mixing = evidence.split.events_of("mixes_rows")
    if mixing:
        return _module(evidence, mixing[0], names)
    found = _of_loss(evidence.split)
    if not found:
        return None
    first = _first(evidence.split, found)
    sentence = (
        f"The loss depends on statistics of the batch ({first['function']} at {first['site']}) that each rank takes of "
        "its own rows alone, where one process takes them of the rows of all ranks."
    )
    remedy = (
        "Take the statistics of the rows of all ranks, by an all_reduce of sums and counts or by a "
        "gather with gradient; "
        "if they are meant to be of each rank's rows: --accept loss_statistics."
    )
    return evidence.finding("loss_statistics", sentence, remedy, site=first["site"])


def _of_loss(split: RankRecord) -> list[Event]:
    """The functions before the first step that a loss may depend on: what comes after the last backward, such as the
    norm of a gradient, is not part of a loss."""
    step = split.events_of("step")
    until = step[0]["step"] if step else 1
    events = [event for event in split.events_of("row_statistic", "backward") if event["step"] < until]
    last = max((at for at, event in enumerate(events) if event["kind"] == "backward"), default=len(events))
    return [event for event in events[:last] if event["kind"] == "row_statistic" and event["rows"] > 1]


def _first(split: RankRecord, found: list[Event]) -> Event:
    """The first function that is not merely the mean at the end which the loss itself is."""
    backward = next((event["site"] for event in split.events_of("backward")), "")
    loss = [event["site"] for event in found if event["site"] != backward]
    return next((event for event in found if loss and event["site"] == loss[0]), found[0])


def _module(evidence: Evidence, event: Event, names: tuple[str, ...]) -> Finding:
    module, kind = evidence.shown([event["module"]])[0], event["type"]
    site = next(
        (
            str(network["sites"][event["module"]])
            for network in evidence.split.events_of("network")  # type: ignore[union-attr]
            if network["sites"].get(event["module"])
        ),
        evidence.found.site,
    )
    sentence = (
        f"Layer {module} ({kind}) takes statistics of one rank's rows alone, where one process takes "
        f"them of the rows of "
        f"all {evidence.count} ranks: its output for a row depends on the other rows of the batch."
    )
    remedy = (
        "Convert the layer (torch.nn.SyncBatchNorm.convert_sync_batchnorm), or take its statistics of the rows of all "
        "ranks; if statistics of each rank's rows are meant: --accept batch_statistics."
    )
    tensors = tuple(name for name in names if name.startswith(f"{module}.")) + tuple(
        name for name in names if not name.startswith(f"{module}.")
    )
    return evidence.finding("batch_statistics", sentence, remedy, tensors=(module, *tensors), site=site)
