"""Texts of training scripts without a mistake, of the cases that ``healthy_cases`` chooses.

``test_healthy_scripts.py`` shows, without the check of scripts, that each trains the network which one process trains
on the same rows, and then that the check finds nothing in it.
"""

from __future__ import annotations

from textwrap import dedent, indent

from healthy_cases import SAME_ROWS, TOKENS, Case
from healthy_parts import (
    AVERAGE,
    BATCHES,
    CLIP,
    CLIP_BY_TORCH,
    DICTIONARIES,
    EVALUATIONS,
    IMPORTS,
    NETWORKS,
    OPTIMIZERS,
    OWN_MASKS,
    PIPELINE_NETWORKS,
    ROWS,
    SCHEDULES,
    SENTENCES,
    STREAM,
    TENSOR_NETWORKS,
    TENSOR_PLANS,
    WRAPPED,
)

EPOCHS = 2
ROW_COUNTS = {"tail": 100, "drop last": 101}
"""The rows where they are not 96."""
DRAWN_STEPS = 8


def block(text: str) -> str:
    return dedent(text).strip("\n") + "\n"


def script(case: Case) -> str:
    """The text of the script, which torchrun starts with ``case.ranks`` processes."""
    if case.stack == "trainer":
        return trainer_script(case)
    if case.stack == "accelerate":
        return accelerate_script(case)
    if case.stack == "pipeline":
        return pipeline_script(case)
    return distributed_script(case)


def module(case: Case, imports: list[str], definitions: list[str], body: str) -> str:
    """Imports, constants, definitions and the body, at module level or in ``main``, by the seed."""
    constants = [f"BATCH = {24 // case.accumulation}  # of all processes", f"EPOCHS = {EPOCHS}", f"SEED = {case.seed}"]
    if case.accumulation > 1:
        constants.append(f"ACCUMULATION = {case.accumulation}")
    if case.stack != "pipeline":
        constants.append(f"DROPOUT = {0.1 if case.dropout else 0.0}")
    head = f'"""Trains a small network: {case.network}, {case.stack}."""\n\n' + "\n".join(imports) + "\n\n"
    head += "\n".join(constants) + "\n\n\n" + "\n\n".join(block(text) for text in definitions) + "\n\n"
    if case.stack == "ddp" and case.seed % 16 == 0:
        return head + body
    return head + "def main():\n" + indent(body, "    ") + '\n\nif __name__ == "__main__":\n    main()\n'


def network_rows(case: Case) -> str:
    return ROWS["tokens" if case.network in TOKENS else case.network]


def dataset_definitions(case: Case) -> list[str]:
    if case.data == "padded":
        return [SENTENCES]
    if case.data == "dictionaries" or case.stack == "trainer":
        return [DICTIONARIES]
    if case.data == "iterable":
        return [STREAM]
    return [BATCHES[case.data]] if case.data in BATCHES else []


def dataset(case: Case) -> str:
    if case.data == "padded":
        return "Sentences(x, y)"
    return "Rows(x, y)" if case.data == "dictionaries" or case.stack == "trainer" else "TensorDataset(x, y)"


def loader_options(case: Case) -> str:
    options = ""
    if case.data == "padded":
        options += ", collate_fn=pad"
    if case.data == "processes":
        options += ", num_workers=2"
    if case.data == "drop last":
        options += ", drop_last=True"
    return options


def loaded(case: Case) -> str:
    """Lines that make ``loader``, and ``sampler`` where there is one."""
    count = ROW_COUNTS.get(case.data, 96)
    lines = f"x, y = rows({count}, seed=1)\n"
    options = loader_options(case)
    if case.stack in SAME_ROWS:
        lines += f"dataset = {dataset(case)}\norder = torch.Generator().manual_seed(SEED)  # the same on all ranks\n"
        return lines + f"loader = DataLoader(dataset, BATCH, shuffle=True, generator=order{options})\n"
    if case.data == "iterable":
        return lines + "stream = Stream(x, y, rank, world)\nloader = DataLoader(stream, BATCH // world)\n"
    if case.data == "slices":
        return lines + "generator = torch.Generator().manual_seed(SEED)  # each process takes a part of each draw\n"
    if case.data == "draws":
        return lines + "generator = torch.Generator().manual_seed(SEED + rank)\n"
    dropped = ", drop_last=True" if case.data == "drop last" else ""
    lines += f"dataset = {dataset(case)}\nsampler = DistributedSampler(dataset, seed=SEED{dropped})\n"
    return lines + f"loader = DataLoader(dataset, BATCH // world, sampler=sampler{options})\n"


def unpacked(case: Case) -> str:
    return 'x, y = batch["x"], batch["labels"]' if case.data in ("dictionaries", "padded") else "x, y = batch"


def total_steps(case: Case) -> str:
    if case.data in BATCHES:
        return str(DRAWN_STEPS)
    if case.data == "iterable":
        return f"EPOCHS * {96 // 24}"
    return "EPOCHS * len(loader)" + (f" // {case.accumulation}" if case.accumulation > 1 else "")


def forward(case: Case) -> str:
    """Lines that make ``loss`` of ``batch``."""
    lines = f"{unpacked(case)}\n"
    divided = " / ACCUMULATION" if case.accumulation > 1 else ""
    if case.precision == "bfloat16":
        lines += 'with torch.autocast("cpu", dtype=torch.bfloat16):\n'
        return lines + f"    loss = nn.functional.cross_entropy(model(x), y){divided}\n"
    return lines + f"loss = nn.functional.cross_entropy(model(x), y){divided}\n"


def update(case: Case) -> str:
    """Lines from the gradient of a window to the next weights."""
    lines = "average_gradients(model, world)\n" if case.stack == "by hand" else ""
    clip = "clip_gradients(model, 0.5)\n" if case.stack == "tensor" else CLIP_BY_TORCH
    clipped = clip if case.clipping else ""
    if case.precision == "scaler":
        lines += ("scaler.unscale_(optimizer)\n" + clipped) if clipped else ""
        lines += "scaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()\n"
    else:
        lines += clipped + "optimizer.step()\noptimizer.zero_grad()\n"
    return lines + ("schedule.step()\n" if case.schedule in ("warm-up", "cosine", "one cycle") else "")


def step(case: Case) -> str:
    """Lines for one batch, whose number is ``number``."""
    if case.optimizer == "lbfgs":
        averaged = "    average_gradients(model, world)\n" if case.stack == "by hand" else ""
        closure = "def closure():\n    optimizer.zero_grad()\n"
        closure += "    loss = nn.functional.cross_entropy(model(x), y)\n    loss.backward()\n" + averaged
        return f"{unpacked(case)}\n\n{closure}    return loss\n\nloss = optimizer.step(closure)\n"
    backward = "scaler.scale(loss).backward()\n" if case.precision == "scaler" else "loss.backward()\n"
    if case.accumulation == 1:
        return forward(case) + backward + update(case)
    last = "last = (number + 1) % ACCUMULATION == 0\n"
    if case.stack.startswith("ddp"):
        lines = last + "with nullcontext() if last else model.no_sync():\n" + indent(forward(case) + backward, "    ")
    elif case.stack == "fsdp2":
        lines = last + "model.set_requires_gradient_sync(last)\n" + forward(case) + backward
    else:
        lines = last + forward(case) + backward
    return lines + "if last:\n" + indent(update(case), "    ")


def loop(case: Case, line_of_evaluation: str) -> str:
    shown = "loss" if case.accumulation == 1 else "loss * ACCUMULATION"
    report = f'if rank == 0:\n    print(f"loss {{({shown}).item():.4f}}")\n'
    end = line_of_evaluation + ("schedule.step()\n" if case.schedule == "per epoch" else "")
    if case.data in BATCHES:
        count = DRAWN_STEPS * case.accumulation
        lines = "drawn = batches(x, y, generator, rank, world)\n"
        lines += f"for number in range({count}):\n    batch = next(drawn)\n" + indent(step(case), "    ")
        if end:
            lines += f"    if (number + 1) % {count // EPOCHS} == 0:\n" + indent(end, "        ")
        return lines + report
    numbered = "for number, batch in enumerate(loader):" if case.accumulation > 1 else "for batch in loader:"
    begun = {"iterable": "    stream.epoch = epoch\n"}.get(case.data, "    sampler.set_epoch(epoch)\n")
    begun = "" if case.stack in SAME_ROWS else begun
    lines = f"for epoch in range(EPOCHS):\n{begun}    {numbered}\n" + indent(step(case), "        ")
    return lines + indent(end + report, "    ")


def data_import(case: Case) -> str:
    names = {"DataLoader"}
    if case.data == "iterable":
        names |= {"IterableDataset"}
    elif case.data in ("dictionaries", "padded"):
        names |= {"Dataset"}
    else:
        names |= {"TensorDataset"}
    if case.stack not in (*SAME_ROWS, "accelerate") and case.data != "iterable":
        names |= {"DistributedSampler"}
    return f"from torch.utils.data import {', '.join(sorted(names))}"


def optimization(case: Case) -> str:
    """Lines that make the optimizer and what goes with it."""
    made = f"optimizer = {OPTIMIZERS[case.optimizer]}\n"
    if case.schedule != "none":
        made += f"schedule = {SCHEDULES[case.schedule].format(total=total_steps(case))}\n"
    if case.precision == "scaler":
        made += 'scaler = torch.amp.GradScaler("cpu", init_scale=256.0)\n'
    if case.dropout:
        made += "torch.manual_seed(1000 * SEED + rank)  # each process draws dropout masks of its own\n"
    return made


def distributed_script(case: Case) -> str:
    """A script of DDP, FSDP2, tensor parallelism, or with an all-reduce by hand."""
    imports = ["import torch", "import torch.distributed as dist", "from torch import nn", *IMPORTS.get(case.stack, [])]
    if case.accumulation > 1 and case.stack.startswith("ddp"):
        imports = ["from contextlib import nullcontext", "", *imports]
    if case.data not in BATCHES:
        imports.append(data_import(case))
    network = TENSOR_NETWORKS if case.stack == "tensor" else NETWORKS
    definitions = [network[case.network], network_rows(case), *dataset_definitions(case)]
    if case.stack == "by hand":
        definitions.append(AVERAGE)
    if case.stack == "tensor" and case.clipping:
        definitions.append(CLIP)
    if case.evaluation != "none":
        definitions.append(EVALUATIONS[case.evaluation])
    wrapped = (
        "model = Network()\n" + block(TENSOR_PLANS[case.network]) if case.stack == "tensor" else WRAPPED[case.stack]
    )
    made = optimization(case)
    evaluation = ""
    if case.evaluation != "none":
        made += "held_out_x, held_out_y = rows(37, seed=2)\n"
        evaluated = "model.module" if case.stack.startswith("ddp") else "model"
        evaluation = f"accuracy = evaluate({evaluated}, held_out_x, held_out_y, rank, world)\n"
        evaluation += 'if rank == 0:\n    print(f"accuracy {accuracy:.4f}")\n'
    body = 'dist.init_process_group("gloo")\nrank, world = dist.get_rank(), dist.get_world_size()\n'
    body += f"torch.manual_seed(SEED)\n{loaded(case)}\n{wrapped}{made}\n"
    closing = "dist.barrier()\ndist.destroy_process_group()\n"
    if case.stack != "ddp in a class":
        return module(case, imports, definitions, body + loop(case, evaluation) + closing)
    definitions.append(in_a_class(case, made, evaluation))
    fed = ", ".join(given_to_the_class(case))
    return module(case, imports, definitions, f"{body.replace(made, '')}Training({fed}).run()\n" + closing)


def given_to_the_class(case: Case) -> list[str]:
    if case.data in BATCHES:
        return ["model", "x", "y", "generator", "rank", "world"]
    return ["model", "loader", "stream" if case.data == "iterable" else "sampler", "rank", "world"]


def in_a_class(case: Case, made: str, evaluation: str) -> str:
    """The loop as a method of a class that holds the model, the optimizer and the loader."""
    given = given_to_the_class(case)
    names = ["optimizer", *given]
    names += [name for name in ("schedule", "scaler") if f"{name} = " in made]
    names += ["held_out_x, held_out_y"] * bool(evaluation)
    listed = [part for name in names for part in name.split(", ")]
    unpacking = "".join(f"{name} = self.{name}\n" for name in listed if name != "optimizer")
    holding = "".join(f"self.{name} = {name}\n" for name in listed)
    text = f"class Training:\n    def __init__(self, {', '.join(given)}):\n{indent(made + holding, ' ' * 8)}\n"
    lines = loop(case, evaluation).replace("optimizer.", "self.optimizer.").replace("(optimizer)", "(self.optimizer)")
    return text + f"    def run(self):\n{indent(unpacking + lines, ' ' * 8)}"


def pipeline_script(case: Case) -> str:
    imports = ["import torch", "import torch.distributed as dist", "from torch import nn"]
    imports += ["from torch.distributed.pipelining import PipelineStage, ScheduleGPipe", data_import(case)]
    body = 'dist.init_process_group("gloo")\nrank, world = dist.get_rank(), dist.get_world_size()\n'
    body += f"torch.manual_seed(SEED)\n{loaded(case)}\n"
    body += "every_layer = layers()\nshare = len(every_layer) // world\n"
    body += "model = nn.Sequential(*every_layer[rank * share : (rank + 1) * share])\n"
    body += "stage = PipelineStage(model, rank, world, torch.device('cpu'))\n"
    body += "schedule_of_stages = ScheduleGPipe(stage, 4, loss_fn=nn.functional.cross_entropy)\n"
    body += f"optimizer = {OPTIMIZERS[case.optimizer]}\n"
    if case.schedule != "none":
        body += f"schedule = {SCHEDULES[case.schedule].format(total=total_steps(case))}\n"
    body += "for epoch in range(EPOCHS):\n    for batch in loader:\n"
    lines = f"{unpacked(case)}\nlosses = []\noptimizer.zero_grad()\ninputs = (x,) if rank == 0 else ()\n"
    lines += (
        "target = y if rank == world - 1 else None\nschedule_of_stages.step(*inputs, target=target, losses=losses)\n"
    )
    lines += "optimizer.step()\n"
    lines += "schedule.step()\n" if case.schedule in ("warm-up", "cosine", "one cycle") else ""
    body += indent(lines, " " * 8) + ("    schedule.step()\n" if case.schedule == "per epoch" else "")
    body += '    if rank == world - 1:\n        print(f"loss {torch.stack(losses).mean().item():.4f}")\n'
    definitions = [PIPELINE_NETWORKS[case.network], network_rows(case), *dataset_definitions(case)]
    return module(case, imports, definitions, body + "dist.barrier()\ndist.destroy_process_group()\n")


def accelerate_script(case: Case) -> str:
    imports = ["import torch", "from accelerate import Accelerator", "from torch import nn", data_import(case)]
    options = ["cpu=True"]
    options += ['mixed_precision="bf16"'] * (case.precision == "bfloat16")
    options += ["gradient_accumulation_steps=ACCUMULATION"] * (case.accumulation > 1)
    body = f"accelerator = Accelerator({', '.join(options)})\ntorch.manual_seed(SEED)\n"
    body += f"x, y = rows({ROW_COUNTS.get(case.data, 96)}, seed=1)\ndataset = {dataset(case)}\n"
    per_process = "BATCH // accelerator.num_processes"
    body += f"loader = DataLoader(dataset, {per_process}, shuffle=True{loader_options(case)})\n"
    body += f"model = Network()\noptimizer = {OPTIMIZERS[case.optimizer]}\n"
    prepared = scheduled_by_accelerate(case)
    schedule = SCHEDULES.get(case.schedule, "").format(total=total_steps(case))
    if prepared:
        body += f"schedule = {schedule}\n"
        body += "model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)\n"
    else:
        body += "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
        body += f"schedule = {schedule}\n".replace("(optimizer", "(optimizer.optimizer") if schedule else ""
    evaluation = ""
    if case.evaluation == "sums":
        body += "held_out = accelerator.prepare(DataLoader(TensorDataset(*rows(37, seed=2)), 8))\n"
        evaluation = "accuracy = evaluate(accelerator, model, held_out)\n"
        evaluation += 'accelerator.print(f"accuracy {accuracy:.4f}")\n'
        imports[-1] = imports[-1] if "TensorDataset" in imports[-1] else f"{imports[-1]}, TensorDataset"
    if case.dropout:
        body += "torch.manual_seed(1000 * SEED + accelerator.process_index)  # dropout masks of its own\n"
    return module(case, imports, accelerate_definitions(case), body + accelerate_loop(case, evaluation))


def scheduled_by_accelerate(case: Case) -> bool:
    """Whether the schedule is prepared: it is then stepped once for every process, and its end counts the batches of
    all of them; with a tail this is not the rate of one process."""
    return case.schedule == "cosine" and case.data != "tail"


def accelerate_definitions(case: Case) -> list[str]:
    evaluate = """
        @torch.no_grad()
        def evaluate(accelerator, model, held_out):
            model.eval()
            correct = count = 0
            for x, y in held_out:
                predicted, y = accelerator.gather_for_metrics((model(x).argmax(1), y))
                correct, count = correct + (predicted == y).sum().item(), count + len(y)
            model.train()
            return correct / count
        """
    definitions = [NETWORKS[case.network], network_rows(case), *dataset_definitions(case)]
    return [*definitions, evaluate] if case.evaluation == "sums" else definitions


def accelerate_loop(case: Case, evaluation: str) -> str:
    lines = f"{unpacked(case)}\nloss = nn.functional.cross_entropy(model(x), y)\naccelerator.backward(loss)\n"
    clip = "accelerator.clip_grad_norm_(model.parameters(), 0.5)\n"
    if case.clipping:
        lines += f"if accelerator.sync_gradients:\n    {clip}" if case.accumulation > 1 else clip
    lines += "optimizer.step()\n"
    if scheduled_by_accelerate(case):
        lines += "schedule.step()\n"
    elif case.schedule in ("warm-up", "cosine", "one cycle"):
        lines += "if accelerator.sync_gradients:\n    schedule.step()\n"
    lines += "optimizer.zero_grad()\n"
    if case.accumulation > 1:
        lines = "with accelerator.accumulate(model):\n" + indent(lines, "    ")
    end = evaluation + ("schedule.step()\n" if case.schedule == "per epoch" else "")
    end += 'accelerator.print(f"loss {loss.item():.4f}")\n'
    body = "for epoch in range(EPOCHS):\n    for batch in loader:\n" + indent(lines, " " * 8) + indent(end, "    ")
    return body + "accelerator.end_training()\n"


def trainer_script(case: Case) -> str:
    imports = ["import os", "import tempfile", "", "import torch", "from torch import nn"]
    imports += ["from torch.utils.data import Dataset", "from transformers import Trainer, TrainingArguments, set_seed"]
    classifier = """
        class Classifier(nn.Module):
            def __init__(self):
                super().__init__()
                self.network = Network()

            def forward(self, x, labels=None):
                logits = self.network(x)
                if labels is None:
                    return {"logits": logits}
                return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        """
    accuracy = """
        def accuracy(prediction):
            return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}
        """
    kinds = {"sgd": "sgd", "adam": "adamw_torch", "adamw": "adamw_torch", "adagrad": "adagrad", "rmsprop": "rmsprop"}
    schedule = {"none": "constant", "warm-up": "constant_with_warmup", "cosine": "cosine"}[case.schedule]
    options = {
        "output_dir": "tempfile.mkdtemp()",
        "per_device_train_batch_size": "BATCH // world",
        "per_device_eval_batch_size": "8",
        "num_train_epochs": "EPOCHS",
        "seed": "SEED",
        "optim": f'"{kinds[case.optimizer]}"',
        "learning_rate": "0.05" if case.optimizer == "sgd" else "2e-3",
        "weight_decay": "0.1" if case.optimizer == "adamw" else "0.0",
        "lr_scheduler_type": f'"{schedule}"',
        "max_grad_norm": "0.5" if case.clipping else "0.0",
        "use_cpu": "True",
        "report_to": "[]",
        "save_strategy": '"no"',
        "disable_tqdm": "True",
        "logging_steps": "4",
    }
    if case.schedule == "warm-up":
        options["warmup_steps"] = "3"
    if case.accumulation > 1:
        options["gradient_accumulation_steps"] = "ACCUMULATION"
    if case.precision == "bfloat16":
        options["bf16"] = "True"
    if case.data == "processes":
        options["dataloader_num_workers"] = "2"
    if case.data == "drop last":
        options["dataloader_drop_last"] = "True"
    if case.evaluation == "sums":
        options["eval_strategy"] = '"epoch"'
    given = ["Classifier()", "arguments", "train_dataset=dataset"]
    given += ["data_collator=pad"] * (case.data == "padded")
    body = 'world = int(os.environ["WORLD_SIZE"])\nset_seed(SEED)\n'
    body += f"x, y = rows({ROW_COUNTS.get(case.data, 96)}, seed=1)\ndataset = {dataset(case)}\n"
    if case.evaluation == "sums":
        body += f"held_out = {dataset(case).split('(')[0]}(*rows(37, seed=2))\n"
        given += ["eval_dataset=held_out", "compute_metrics=accuracy"]
    body += "arguments = TrainingArguments(\n" + "".join(f"    {k}={v},\n" for k, v in options.items()) + ")\n"
    body += f"trainer = Trainer({', '.join(given)})\n"
    if case.dropout:
        imports[-1] = imports[-1].replace("Trainer, ", "Trainer, TrainerCallback, ")
        body += "trainer.add_callback(OwnMasks())\n"
    definitions = [NETWORKS[case.network], classifier, network_rows(case), *dataset_definitions(case)]
    definitions += [OWN_MASKS] * case.dropout + [accuracy] * (case.evaluation == "sums")
    return module(case, imports, definitions, body + "trainer.train()\n")
