"""The names that other libraries give to what this package calls otherwise, with what to write instead."""

from __future__ import annotations

from collections.abc import Mapping

_RATE = "it is an argument of the optimizer: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
_DATA = "data= is a function that makes the training set: data=lambda: training_set()"
_EVALUATION = "held-out data are given as evaluation=apportion.Evaluation(data=lambda: test_set(), metrics={...})"
_LAUNCHER = (
    "where a run computes belongs to the launcher: apportion.train(workload, launcher=apportion.local(workers=2))"
)
_EVENTS = "there are no callbacks: write for event in apportion.run(workload): ..."
_CLIP = "did you mean clip_grad_norm=, the largest 2-norm of the whole gradient?"
_PRECISION = 'did you mean precision="bfloat16" (or "float16", "float32", "float64")?'
_RUN = "it is an argument of apportion.train and apportion.run, not of the workload"

WORKLOAD: Mapping[str, str] = {
    **dict.fromkeys(("lr", "learning_rate", "momentum", "weight_decay", "betas", "base_lr"), _RATE),
    **dict.fromkeys(
        ("max_epochs", "num_epochs", "n_epochs", "num_train_epochs", "epoch", "nb_epoch"), "did you mean epochs=?"
    ),
    **dict.fromkeys(
        ("max_steps", "num_steps", "n_steps", "total_steps", "iterations", "max_iter", "max_iters", "num_iterations"),
        "did you mean steps=?",
    ),
    **dict.fromkeys(
        (
            "dataset",
            "train_data",
            "train_dataset",
            "trainset",
            "training_data",
            "dataloader",
            "loader",
            "train_loader",
            "train_dataloader",
            "train_dataloaders",
            "x",
            "y",
            "inputs",
            "targets",
        ),
        _DATA,
    ),
    **dict.fromkeys(("criterion", "loss_fn", "loss_function", "loss_func", "objective"), "did you mean loss=?"),
    **dict.fromkeys(("net", "network", "module", "model_fn", "model_init"), "did you mean model=?"),
    **dict.fromkeys(("optim", "opt", "optimizers", "optimiser"), "did you mean optimizer=?"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_schedule", "schedulers"), "did you mean schedule=?"),
    **dict.fromkeys(
        (
            "val_data",
            "valid_data",
            "test_data",
            "validation_data",
            "eval_dataset",
            "val_dataset",
            "valset",
            "testset",
            "val_loader",
            "val_dataloader",
            "test_loader",
            "eval_data",
            "metrics",
            "metric",
            "val_dataloaders",
            "test_dataset",
        ),
        _EVALUATION,
    ),
    **dict.fromkeys(
        (
            "device",
            "devices",
            "gpus",
            "gpu",
            "num_gpus",
            "accelerator",
            "workers",
            "nproc",
            "nproc_per_node",
            "world_size",
            "num_nodes",
            "nodes",
            "threads",
        ),
        _LAUNCHER,
    ),
    **dict.fromkeys(
        ("num_workers", "loaders", "pin_memory", "prefetch_factor"),
        "processes that load data belong to the launcher: apportion.train(workload, "
        "launcher=apportion.local(loaders=2))",
    ),
    **dict.fromkeys(("shuffle", "sampler"), 'did you mean order="shuffled" or order="sequential"?'),
    **dict.fromkeys(("collate_fn", "collate_function"), "did you mean collate=?"),
    **dict.fromkeys(("transform", "transforms", "augmentation", "augmentations"), "did you mean augment=?"),
    **dict.fromkeys(
        ("grad_clip", "gradient_clip_val", "clip_grad", "max_grad_norm", "clip", "clip_norm", "gradient_clipping"),
        _CLIP,
    ),
    **dict.fromkeys(
        ("amp", "fp16", "bf16", "mixed_precision", "dtype", "autocast", "half", "use_amp", "float16", "bfloat16"),
        _PRECISION,
    ),
    **dict.fromkeys(
        ("bs", "batch", "batchsize", "per_device_train_batch_size", "train_batch_size", "micro_batch_size"),
        "did you mean batch_size=, the whole batch of all workers together?",
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum", "accumulation_steps"),
        "batch_size= is the whole batch; strategy=data_parallel(microbatches=4) computes it in parts",
    ),
    **dict.fromkeys(("callbacks", "callback", "logger", "loggers", "hooks"), _EVENTS),
    **dict.fromkeys(("random_state", "random_seed", "manual_seed"), "did you mean seed=?"),
    **dict.fromkeys(
        ("strategy", "run_dir", "policy", "launcher", "resume", "trial", "check", "require_proof", "reprove"), _RUN
    ),
    **dict.fromkeys(("val_every", "eval_every", "check_val_every_n_epoch", "eval_steps"), _EVALUATION),
    **dict.fromkeys(("compiled", "torch_compile", "jit"), "did you mean compile=?"),
    **dict.fromkeys(
        ("step", "training_step", "train_step"), "did you mean update=, a function (step, batch) -> values?"
    ),
}
"""The hints for names that ``Workload`` does not have."""

EVALUATION: Mapping[str, str] = {
    **dict.fromkeys(
        ("dataset", "val_data", "test_data", "val_dataset", "loader", "dataloader", "eval_dataset"),
        "did you mean data=, a function that makes the data set?",
    ),
    **dict.fromkeys(("metric", "metric_fn", "compute_metrics", "scorers"), "did you mean metrics=, a dict by name?"),
    **dict.fromkeys(
        ("interval", "frequency", "every_n_epochs", "epochs", "eval_every", "period"),
        "did you mean every=, the epochs between evaluations?",
    ),
    **dict.fromkeys(("monitor", "mode", "best_metric"), 'did you mean best="max accuracy"?'),
    **dict.fromkeys(("bs", "batchsize", "eval_batch_size"), "did you mean batch_size=?"),
    **dict.fromkeys(("criterion", "loss", "loss_fn"), 'a loss is one of the metrics: metrics={"loss": ...}'),
}
"""The hints for names that ``Evaluation`` does not have."""

_FIELDS = (
    "model", "data", "optimizer", "batch_size", "loss", "update", "count", "epochs", "schedule", "clip_grad_norm",
    "collate", "parts", "order", "carry", "augment", "evaluation", "precision", "compile",
)  # fmt: skip
_FIELD = "it is a field of the workload: dataclasses.replace(workload, {0}=...)"

RUN: Mapping[str, str] = {
    **{name: f"it belongs to the workload: {about}" for name, about in WORKLOAD.items() if about is not _RUN},
    **{name: _FIELD.format(name) for name in _FIELDS},
    **dict.fromkeys(
        (
            "workers",
            "num_workers",
            "nproc",
            "nproc_per_node",
            "world_size",
            "processes",
            "num_processes",
            "gpus",
            "device",
            "devices",
            "threads",
            "accelerator",
            "num_gpus",
            "nodes",
            "num_nodes",
            "hosts",
            "loaders",
        ),
        "where a run computes belongs to the launcher: launcher=apportion.local(workers=2)",
    ),
    **dict.fromkeys(
        (
            "out",
            "output_dir",
            "out_dir",
            "dir",
            "save_dir",
            "logdir",
            "log_dir",
            "checkpoint_dir",
            "path",
            "folder",
            "directory",
            "default_root_dir",
        ),
        "did you mean run_dir=?",
    ),
    **dict.fromkeys(
        ("resume_from", "resume_from_checkpoint", "ckpt_path", "checkpoint", "restart"),
        "did you mean resume=True with run_dir=, the directory of the run?",
    ),
    **dict.fromkeys(("max_epochs", "num_epochs", "n_epochs"), _FIELD.format("epochs")),
    **dict.fromkeys(("max_steps", "num_steps", "n_steps", "iterations", "step"), "did you mean steps=?"),
    **dict.fromkeys(("callbacks", "callback", "logger", "loggers", "verbose", "progress", "hooks"), _EVENTS),
    **dict.fromkeys(
        ("save_every", "checkpoint_every", "keep", "max_restarts"),
        'it is a field of the policy: policy=apportion.Policy(checkpoint_every="30 s", keep=3)',
    ),
    **dict.fromkeys(("random_seed", "random_state"), "did you mean seed=?"),
    **dict.fromkeys(("method", "algorithm", "parallel", "backend"), "did you mean strategy=?"),
    **dict.fromkeys(("proof", "prove", "verify"), "did you mean check=False, or require_proof=True?"),
}
"""The hints for names that ``train`` and ``run`` do not have."""

LOCAL: Mapping[str, str] = {
    **dict.fromkeys(
        ("processes", "nproc", "nproc_per_node", "num_processes", "world_size", "n", "ranks"), "did you mean workers=?"
    ),
    **dict.fromkeys(("num_workers", "dataloaders"), "did you mean loaders=, the data-loading processes?"),
    **dict.fromkeys(("gpus", "num_gpus", "gpu", "cuda"), 'did you mean device="cuda" with workers=, one a GPU?'),
    **dict.fromkeys(("cores", "cpus", "num_threads", "omp_num_threads"), "did you mean threads=?"),
}
"""The hints for fields that ``local`` does not have."""

POLICY: Mapping[str, str] = {
    **dict.fromkeys(
        ("save_every", "checkpoint_interval", "every", "save_steps", "interval"),
        'did you mean checkpoint_every="30 s"?',
    ),
    **dict.fromkeys(("keep_last", "save_total_limit", "save_top_k", "max_to_keep"), "did you mean keep=?"),
    **dict.fromkeys(("restarts", "retries", "max_failures"), "did you mean max_restarts=?"),
    **dict.fromkeys(("detect_anomaly", "nan"), 'did you mean on_nan="stop"?'),
}
"""The hints for fields that ``Policy`` does not have."""

NAMES: Mapping[str, Mapping[str, str]] = {
    "apportion.strategies": {
        **dict.fromkeys(
            ("ddp", "dp", "dataparallel", "distributed_data_parallel", "distributeddataparallel", "horovod", "hvd"),
            "data_parallel",
        ),
        **dict.fromkeys(
            (
                "fsdp",
                "fsdp2",
                "zero",
                "zero1",
                "zero2",
                "zero3",
                "deepspeed",
                "fullyshardeddataparallel",
                "sharded",
                "fully_sharded_data_parallel",
            ),
            "fully_sharded",
        ),
        **dict.fromkeys(("tp", "megatron", "tensor", "tensorparallel"), "tensor_parallel"),
        **dict.fromkeys(("pp", "gpipe", "pipedream", "pipe", "1f1b", "pipeline"), "pipeline_parallel"),
        **dict.fromkeys(("ps", "param_server", "parameterserver"), "parameter_server"),
        **dict.fromkeys(("fedavg", "localsgd", "diloco", "post_local_sgd"), "local_sgd"),
        **dict.fromkeys(("mp", "model_parallel", "device_map"), "layer_placement"),
        **dict.fromkeys(("single", "one_device", "cpu", "gpu", "cuda", "none", "serial"), "single_device"),
        **dict.fromkeys(("mapreduce",), "map_reduce"),
        **dict.fromkeys(("hybrid", "3d", "2d"), "hybrid_parallel"),
    },
    "apportion.runtime.launch": {
        **dict.fromkeys(("torchrun", "torchelastic", "mpi", "mpirun", "srun", "elastic", "kubernetes"), "env"),
        **dict.fromkeys(("localhost", "multiprocessing", "spawn", "fork", "cpu", "process", "processes"), "local"),
        **dict.fromkeys(("cuda", "gpu", "gpus"), "local(device='cuda')"),
        **dict.fromkeys(("sbatch", "salloc"), "slurm"),
    },
    "apportion.parallel.compression.methods": {
        **dict.fromkeys(("bfloat16",), "bf16"),
        **dict.fromkeys(("float16", "half"), "fp16"),
        **dict.fromkeys(("powersgd",), "power_sgd"),
        **dict.fromkeys(("topk",), "top_k"),
    },
    "apportion.exporting.targets": {
        **dict.fromkeys(("onnxruntime", "ort", "openvino"), "onnx"),
    },
}
"""The value that is meant by a name of another library, in small letters, by the folder of the values."""

PRECISIONS: Mapping[str, str] = {
    **dict.fromkeys(("bf16", "bf16-mixed", "bfloat", "torch.bfloat16", "bf16-true"), "bfloat16"),
    **dict.fromkeys(("fp16", "half", "16", "16-mixed", "f16", "torch.float16", "mixed", "amp"), "float16"),
    **dict.fromkeys(("fp32", "single", "32", "full", "f32", "torch.float32", "float", "32-true"), "float32"),
    **dict.fromkeys(("fp64", "double", "64", "f64", "torch.float64", "64-true"), "float64"),
}
"""The precision that is meant by a name of another library, in small letters."""

CHECK: Mapping[str, str] = {
    **{name: about for name, about in RUN.items() if name not in ("workers", "steps", "path", "out")},
    **dict.fromkeys(("nproc", "num_workers", "processes", "world_size"), "did you mean workers=?"),
}
"""The hints for names that ``check`` and ``compare`` do not have."""

PLAN: Mapping[str, str] = {
    **CHECK,
    **dict.fromkeys(
        ("strategy", "strategies"),
        "a plan is of all strategies: apportion.compare(workload, strategies) measures those that are named",
    ),
}
"""The hints for names that ``plan`` does not have."""

SERVE: Mapping[str, str] = {
    name: f"it is a setting of the server: serving=apportion.Serving({name}=...)"
    for name in ("host", "port", "names", "replication", "aggregation", "most_rows")
}
"""The hints for names that ``serve`` does not have."""
