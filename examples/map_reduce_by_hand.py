"""Map-Reduce by hand: the gradient of a linear hypothesis over 400 rows, by one machine and by four.

    python examples/map_reduce_by_hand.py

It is the textbook's picture of data parallelism: each of four machines computes a temporary, the sum of the gradient
over its 100 rows, and a master adds the four temporaries up. `map_reduce` and `data_parallel` do the same for any
network: this file shows that there is nothing more to it.
"""

import torch

ROWS, MACHINES, RATE, ITERATIONS = 400, 4, 0.1, 100


def temporary(theta, x, y):
    """The sum of the gradient over some rows: (h(x) - y) x, with the hypothesis h(x) = theta x."""
    return (x @ theta - y) @ x


def descend(x, y, machines):
    """Gradient descent over all rows, dealt to so many machines; returns theta."""
    theta = torch.zeros(x.shape[1], dtype=x.dtype)
    for _ in range(ITERATIONS):
        mapped = [temporary(theta, *rows) for rows in zip(x.chunk(machines), y.chunk(machines), strict=True)]  # map
        theta -= RATE * sum(mapped) / len(x)  # reduce
    return theta


def main():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    y = x @ torch.arange(1.0, 6.0, dtype=torch.float64)
    one, four = descend(x, y, 1), descend(x, y, MACHINES)
    print(f"theta of one machine:    {[round(t, 4) for t in one.tolist()]}")
    print(f"theta of four machines:  {[round(t, 4) for t in four.tolist()]}")
    difference = (one - four).abs().max().item()
    assert difference < 1e-12, difference
    print("the sum of four machines' temporaries is that of one machine")


if __name__ == "__main__":
    main()
