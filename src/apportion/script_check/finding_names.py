"""The names of findings, which ``--accept`` takes, each with what is wrong in one clause."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

FINDING_NAMES: Mapping[str, str] = {
    "accumulation_divided_twice": "the micro-batches of a window are divided by their number more than once",
    "accumulation_undivided": "the gradients of several micro-batches are summed and not divided by their number",
    "batch_statistics": "a layer normalises over the rows of each rank alone",
    "clipped_before_average": "gradients are clipped on each rank before they are averaged",
    "clipped_scaled": "gradients are clipped while a GradScaler's scale is in them",
    "different_beginnings": "ranks begin with different weights",
    "different_lists": "ranks reduce different lists of tensors with each other",
    "differs": "gradients or weights differ from those of one process, for a reason that is not known",
    "diverged_collectives": "ranks call different collectives",
    "dropped_micro_batches": "some micro-batches of a window are not in the gradient",
    "evaluation": "a figure of an evaluation counts rows twice, or weights batches of unequal size alike",
    "fixed_order": "each epoch has the same order of rows, and no sampler shuffles",
    "flags": "modules are in training mode on some ranks and in evaluation mode on others",
    "gather_without_gradient": "a collective in the forward has no backward",
    "hang": "ranks wait for others that do not arrive",
    "inputs_differ": "the ranks of one tensor-parallel group are given different inputs",
    "learning_rates": "learning rates differ between ranks",
    "loaded_weights": "ranks load other weights, or another state of an optimizer, than were saved",
    "loss_statistics": "the loss uses statistics of the rows of each rank alone",
    "micro_batch_statistics": "a step's gradient depends on which rows share a micro-batch",
    "micro_batches_unequal": "the micro-batches of a window have unequal weights in the gradient",
    "micro_batches_weighted_alike": "micro-batches with unequally many tokens have equal weights in the gradient",
    "not_averaged": "gradients are not averaged over the ranks",
    "not_resumed": "a run that is to resume begins with other weights than any earlier step has left",
    "rank_died": "a rank ended without an error of the script",
    "rank_ended_early": "a rank left the script while others waited for it",
    "rank_raised": "a rank raised an error while others waited for it",
    "ranks_weighted": "ranks with equally many rows have unequal weights in the gradient",
    "ranks_weighted_alike": "ranks with unequally many rows or tokens have equal weights in the gradient",
    "reference_differs": "gradients differ from those of the function that is given as a reference",
    "resumed_rows": "after a resume, rows are read again or left out",
    "resumed_state": "an optimizer loses its state at a resume",
    "same_draws": "ranks draw the same random numbers for different rows",
    "same_order": "each epoch has the same order of rows although the sampler shuffles",
    "scale": "gradients are a multiple of those of one process",
    "scaled_apart": "gradients are a multiple of those of one process that differs between ranks",
    "scaled_rate": "learning rates are a multiple of those of one process",
    "scaler": "the scale of a GradScaler differs between ranks",
    "schedule": "the learning rate changes faster or slower than in one process",
    "shape_mismatch": "ranks call a collective with tensors of different shapes",
    "shards_scaled_apart": "the shards of one tensor are multiples of it that differ between ranks",
    "shared_rows": "rows are read by several ranks",
    "short_window": "a step at the end of an epoch has fewer micro-batches than it is divided by",
    "skipped_steps": "some ranks make optimizer steps that others leave out",
    "stale_optimizer": "an optimizer holds tensors that are no longer those of the network",
    "tied_apart": "one parameter of one process is several on the ranks",
    "trained_parameters": "ranks train different parameters",
    "uneven_batches": "ranks read unequally many batches in an epoch",
    "uneven_micro_batches": "micro-batches of unequal size have equal weights in the gradient",
    "unlike_draws": "ranks draw different random numbers for the same activations",
    "unmatched_receive": "a rank waits for a message that no rank sends",
    "unmatched_send": "a rank sends a message that no rank receives",
    "unread_rows": "some rows are read by no rank",
    "unused_parameters": "DistributedDataParallel waits for gradients of parameters that are not used",
    "weight_decay": "the weight decay differs between ranks",
    "weights_differ": "weights differ after a step whose gradients agree",
    "zero_gradients": "all gradients are zero",
}
"""What each finding is about, by its name."""
_WHERE = "each finding prints its name, and docs/check_scripts.md lists them all"


def check_finding_names(given: Iterable[str]) -> None:
    """Raise ValueError for a name that no finding has, with those that are most like it."""
    for name in given:
        if name not in FINDING_NAMES:
            close = difflib.get_close_matches(name.lower().replace("-", "_"), FINDING_NAMES, 3, 0.5)
            hint = f"did you mean {' or '.join(close)}?" if close else _WHERE
            raise ValueError(f"{name!r} is not the name of a finding, and cannot be accepted: {hint}")
