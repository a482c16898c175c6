"""One rank of local_sgd whose rounds close at their deadline. python open_rounds_side.py FOLDER ROUNDS STRATEGY

MNIST, the small convolutional network of mnist.py, with smoothed labels. Rank 0 ends the run after so many rounds, and
leaves in the folder the log of the rounds and the loss of the last average on the test set.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "networks"))

import mnist
import torch
from torch import nn

from apportion import World, batches
from apportion.core.value import parse

ENDLESS = 10**7
OWN_SECONDS = 0.01
"""What a step waits besides: hosts share two cores here, and so have some of their time to themselves."""
loss = nn.CrossEntropyLoss(label_smoothing=0.1)


def main(folder, rounds, strategy):
    torch.set_num_threads(1)
    workload = replace(mnist.workload, loss=loss, evaluation=None, epochs=None, steps=ENDLESS)
    world = World.from_env(device="cpu", meets=False)
    step = parse(strategy, "apportion.strategies").build(workload, world)
    done = 0
    for batch in batches(step):
        step(batch)
        time.sleep(OWN_SECONDS)
        if world.rank == 0 and step.done != done:
            done = step.done
            (Path(folder) / "rounds").write_text(str(len(step.log()[0].rounds)))
            if len(step.log()[0].rounds) >= int(rounds):
                break
    if world.rank == 0:
        step.log()[0].save(Path(folder) / "log")
        model = mnist.network()
        model.load_state_dict(step.state_dict().model)
        model.eval()
        x, y = mnist.images("t10k").tensors
        with torch.no_grad():
            (Path(folder) / "loss").write_text(json.dumps(loss(model(x), y).item()))
    step.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
