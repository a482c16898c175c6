"""Actor-critics (apportion.actor_critic) against Stable-Baselines3, TorchRL, Sample Factory, and A3C step by step.

    python benchmarks/rows/reinforcement.py --json FILE [--only id,...]

frames_sb3        frames of CartPole per second of processor time, one worker against Stable-Baselines3's A2C with its
                  environments in the same process: 64 environments, 16 steps, the same network and optimizer.
frames_sb3_16     the same with 16 environments.
frames_sb3_best   frames/s on two cores, 16 steps: two workers at the fastest of their strategies and numbers of
                  environments, against the fastest of A2C's 8, 32 and 64 environments, in its process (dummy) or in
                  processes of their own (subproc).
frames_step       frames/s of parameter_server with two workers against A3C as it is usually written, one forward a step
                  and one environment a process (peers/a3c_per_step.py), two workers, the faster of 5 and 20 steps.
frames_sf         frames/s on two cores against Sample Factory's asynchronous PPO, the fastest of one process and of
                  workers with a learner.
frames_torchrl    the same against TorchRL's A2C with an asynchronous collector, the fastest of one and two.
pong_sb3          frames/s of Pong from pixels on two cores, each frame four of the emulator's: two workers, each with
                  ale-py's vector of 16 environments, against A2C with AtariWrapper; 5 steps, the zoo's number.
pong_step         the same against A3C step by step.
cartpole_a2c      seconds of training until the greedy mean of 100 episodes of CartPole is 475, against
                  Stable-Baselines3's A2C with the settings of rl-baselines3-zoo.
cartpole_ppo      the same against its PPO.
acrobot           the same until -100 in Acrobot, against A2C.
lunar             the same until 200 in LunarLander, against PPO.
scaling           frames/s of parameter_server on CartPole, two workers against one: the ratio is how many times faster.
scaling_pong      the same on Pong.
scaling_score     seconds until the greedy mean of 100 episodes of CartPole is 475, parameter_server with two workers
                  against one, 20 seeds.
sharded_hogwild   frames/s of parameter_server, two workers, with a lock for each shard against hogwild.
sample_efficiency frames until 475 in CartPole, ours and A2C with the same settings; the ratio is how many times as many
                  frames ours takes.
planned_*         frames/s that `apportion plan` predicts without a trial against those measured, of the examples
                  CartPole, Acrobot, Pendulum and LunarLander by every strategy and number of workers that is priced,
                  and of two other sizes of their rollouts by every strategy that `plan` tells of: ours is the median
                  error, the peer the 0.2 that is allowed. `points` has each pair.

Frames are steps of environments, without those that only begin an episode again. Every process has one thread. The two
sides run in turn, A B A B, the other one parked; a side that has settings to choose from is tried with each for 3 s
first, and is compared with the fastest. Nothing is evaluated while frames are counted; to a score, the clocks stand
still while a common judge plays its 100 episodes (judge.py). Five seeds, medians; a seed that does not come to the
score counts with all that its budget takes, and is printed so. Frames to a score differ by a factor of ten between
seeds, so sample_efficiency has 30 of them; and 15,000 frames are often enough, so it looks at the score every 1,000.
The rows of scaling have 25 turns, for the two cores of a machine are not always worth the same. `what` has the seconds
and the seconds of processor time of both sides and, to a score, the interval of the ratio over the seeds. Except in
sample_efficiency a ratio above 1 is better than the peer.

The peers' packages are installed at the first use, in front of this environment (peers/sb3.txt, torchrl.txt,
sample_factory.txt), below ~/.cache/apportion/peers. A side that fails makes a failed row, and exit status 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))

from rollout_planned import Planned
from rollout_rows import Player, Rates, ToScore
from table import main, measured

STEPS = 16
A2C = {"ent_coef": 0.0}
"""What is not the default of Stable-Baselines3: 5 steps, a learning rate of 0.0007, RMSprop, gamma 0.99, clipped at
0.5."""
CARTPOLE = {"environment": "CartPole-v1", "steps": STEPS, "lr": 0.003, "entropy": 0.0}
PONG = {"environment": "pong", "steps": 5, "environments": 16, "lr": 0.0007, "entropy": 0.01}
ASYNCHRONOUS, SYNCHRONOUS = "parameter_server", "data_parallel"


def ours(order, strategy=ASYNCHRONOUS, ranks=2, **more):
    """Two workers, unless said otherwise; each of them has an actor."""
    actors = ranks if strategy == SYNCHRONOUS else 1
    return Player("ours", {"anneal": False} | order | {"strategy": strategy, "actors": actors} | more, ranks)


def frames_sb3(environments):
    """The same work in one process each."""
    return Rates(
        f"CartPole, {environments} environments, 16 steps, one process, against A2C",
        (ours(CARTPOLE, "single_device", 1, environments=environments),),
        (sb3("CartPole-v1", "A2C", environments, n_steps=STEPS, **A2C),),
        by="cpu",
    )


def each_way(order, *widths):
    """Two workers by every strategy, with so many environments each."""
    return tuple(
        ours(order, strategy, environments=width)
        for strategy in (ASYNCHRONOUS, "hogwild", SYNCHRONOUS)
        for width in widths
    )


def sb3(environment, algorithm, environments, vector="dummy", normalize=False, **settings):
    """Stable-Baselines3."""
    order = {"environment": environment, "algorithm": algorithm, "environments": environments, "vector": vector}
    frames = {"frames": settings.pop("frames")} if "frames" in settings else {}
    return Player("sb3", order | frames | {"normalize": normalize, "settings": settings})


def both_vectors(*arguments, **settings):
    return tuple(sb3(*arguments, vector=vector, **settings) for vector in ("dummy", "subproc"))


def per_step(environment, lr):
    """A3C step by step, two workers."""
    order = {"environment": environment, "workers": 2, "lr": lr}
    return tuple(Player("a3c_per_step", order | {"steps": steps}) for steps in (5, 20))


def torchrl(collectors, environments):
    order = {"environment": "CartPole-v1", "steps": STEPS, "lr": 0.003}
    return Player("torchrl", order | {"collectors": collectors, "environments": environments})


def sample_factory(serial, workers, environments):
    order = {"environment": "CartPole-v1", "steps": STEPS, "serial": serial}
    return Player("sample_factory", order | {"workers": workers, "environments": environments})


ZOO = {
    "cartpole_a2c": both_vectors("CartPole-v1", "A2C", 8, frames=500_000, **A2C),
    "cartpole_ppo": both_vectors(
        "CartPole-v1", "PPO", 8, frames=100_000, n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20,
        ent_coef=0.0, learning_rate="lin_0.001", clip_range="lin_0.2",
    ),
    "acrobot": both_vectors("Acrobot-v1", "A2C", 16, normalize=True, frames=500_000, **A2C),
    "lunar": both_vectors(
        "LunarLander-v3", "PPO", 16, frames=1_000_000, n_steps=1024, batch_size=64, gae_lambda=0.98, gamma=0.999,
        n_epochs=4, ent_coef=0.01,
    ),
}  # fmt: skip
"""What rl-baselines3-zoo sets (hyperparams/a2c.yml and ppo.yml), and its number of frames; LunarLander-v2 is v3 now."""


def tuned(environment, example, **sizes):
    """Ours, with the preset of an example, in one process: by what is measured there it is as fast as two."""
    order = {"environment": environment, "example": example, "steps": 16, "strategy": "single_device", "actors": 1}
    return Player("ours", order | sizes)


TUNED = {
    "cartpole": tuned("CartPole-v1", "a3c_cartpole", environments=8, frames=60_000),
    "acrobot": tuned("Acrobot-v1", "a3c_acrobot", environments=16, frames=100_000),
    "lunar": tuned("LunarLander-v3", "a3c_lunar_lander", environments=8, steps=128, frames=3_000_000),
}  # fmt: skip
"""Ours."""


def tuned_of(ranks):
    """Ours of CartPole by parameter_server, with so many workers."""
    return Player("ours", TUNED["cartpole"].order | {"strategy": ASYNCHRONOUS}, ranks)


AS_SB3 = ours(
    CARTPOLE | {"steps": 5, "lr": 0.0007}, "single_device", 1, environments=8, frames=500_000, gamma=0.99, value=0.5
)

ROWS = {
    "frames_sb3": frames_sb3(64),
    "frames_sb3_16": frames_sb3(16),
    "frames_sb3_best": Rates(
        "CartPole, 16 steps, two cores, against the fastest A2C",
        each_way(CARTPOLE, 16, 64),
        tuple(
            player
            for width in (8, 32, 64)
            for player in both_vectors("CartPole-v1", "A2C", width, n_steps=STEPS, **A2C)
        ),
    ),
    "frames_step": Rates(
        "CartPole, two workers, against A3C step by step",
        (ours(CARTPOLE, environments=16),),
        per_step("CartPole-v1", 0.003),
    ),
    "frames_sf": Rates(
        "CartPole, 16 steps, two cores, against Sample Factory",
        each_way(CARTPOLE, 16, 64),
        (
            sample_factory(True, 1, 16), sample_factory(True, 1, 64), sample_factory(False, 1, 64),
            sample_factory(False, 2, 64),
        ),
    ),
    "frames_torchrl": Rates(
        "CartPole, 16 steps, two cores, against TorchRL",
        each_way(CARTPOLE, 16, 64),
        tuple(torchrl(collectors, width) for collectors in (1, 2) for width in (16, 64)),
    ),
    "pong_sb3": Rates(
        "Pong from pixels, 16 environments, 5 steps, two cores, against A2C",
        each_way(PONG, 16),
        both_vectors("pong", "A2C", 16, vf_coef=0.25, ent_coef=0.01),
    ),
    "pong_step": Rates(
        "Pong from pixels, two workers, against A3C step by step", (ours(PONG),), per_step("pong", 0.0007)
    ),
    "cartpole_a2c": ToScore("CartPole to 475", TUNED["cartpole"], ZOO["cartpole_a2c"], 475, 5_000),
    "cartpole_ppo": ToScore("CartPole to 475", TUNED["cartpole"], ZOO["cartpole_ppo"], 475, 5_000),
    "acrobot": ToScore("Acrobot to -100", TUNED["acrobot"], ZOO["acrobot"], -100, 10_000),
    "lunar": ToScore("LunarLander to 200", TUNED["lunar"], ZOO["lunar"], 200, 16_384),
    "scaling": Rates(
        "CartPole, parameter_server, two workers against one",
        (ours(CARTPOLE, environments=16),),
        (ours(CARTPOLE, ranks=1, environments=16),),
        rounds=25,
    ),
    "scaling_pong": Rates(
        "Pong, parameter_server, two workers against one", (ours(PONG),), (ours(PONG, ranks=1),), rounds=25
    ),
    "scaling_score": ToScore(
        "CartPole to 475, parameter_server, two workers against one", tuned_of(2), (tuned_of(1),), 475, 2_000,
        seeds=tuple(range(20)),
    ),
    "sharded_hogwild": Rates(
        "CartPole, two workers, parameter_server against hogwild",
        (ours(CARTPOLE, environments=16),),
        (ours(CARTPOLE, "hogwild", environments=16),),
    ),
    "sample_efficiency": ToScore(
        "CartPole to 475, the same settings", AS_SB3, (sb3("CartPole-v1", "A2C", 8, frames=500_000, **A2C),), 475,
        1_000, by="frames", seeds=tuple(range(30)),
    ),
    **{f"planned_{name}": Planned(name) for name in ("cartpole", "acrobot", "pendulum", "lunar_lander")},
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(__doc__, ROWS, measured(ROWS)))
