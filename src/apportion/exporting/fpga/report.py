"""The figures of a circuit as tables, and in whole sentences what they come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apportion.exporting.fpga.compiler import Circuit
from apportion.exporting.fpga.proof import ProvedLayer
from apportion.exporting.target import Table


def tables(
    circuit: Circuit, proof: Sequence[ProvedLayer], limits: Mapping[str, bool], clock_mhz: float, *, simulated: bool
) -> tuple[Table, ...]:
    """Return what is proved, and what the circuit takes. ``simulated``: does a simulator of Verilog run the file?"""
    return (_proved(proof, limits, simulated=simulated), _placed(circuit, clock_mhz))


def _proved(proof: Sequence[ProvedLayer], limits: Mapping[str, bool], *, simulated: bool) -> Table:
    sampled = "in simulation only" if simulated else "not shown: no simulator of Verilog has run it"
    rows: list[tuple[str, str, int, str]] = [
        (layer.name, layer.kind, layer.numbers, "for every input") for layer in proof
    ]
    rows += [
        (name, "rounds and limits", 1, "for every number, by yosys' SAT" if known else sampled)
        for name, known in limits.items()
    ]
    rows.append(("the counters of beats and stages", "control", 2, sampled))
    return Table(
        title="What the circuit is shown to compute",
        columns=("layer or module", "kind", "numbers", "shown"),
        rows=tuple(rows),
        note="Layers are carried through the file as sums with integer coefficients, with their ranges: no statement "
        "overflows or truncates, and each is the network's in integers.",
    )


def _placed(circuit: Circuit, clock_mhz: float) -> Table:
    ports, placement = circuit.ports, circuit.placement
    rows: list[tuple[str, str | int | float]] = [
        ("products of a weight and an input", circuit.connections),
        ("adders", circuit.adders),
        ("stages", ports.stages),
        ("cycles in which an example enters", ports.beats),
    ]
    if placement is None:
        rows.append(("placed", "no"))
        note = "The circuit was not placed and routed: nothing is known of its clock and of the cells that it takes."
    else:
        cycles = ports.beats + ports.stages
        rows += [
            ("look-up tables", placement.luts),
            ("flip-flops", placement.flip_flops),
            (
                "logic cells",
                f"{placement.cells_used} of {placement.cells}, {placement.cells_used / placement.cells:.0%}",
            ),
            ("pins", placement.pins_used),
            ("clock reached, MHz", round(placement.mhz, 2)),
            ("clock asked for, MHz", clock_mhz),
            ("latency at the clock reached, ns", round(1000 * cycles / placement.mhz)),
            ("examples a second at the clock reached", round(1e6 * placement.mhz / ports.beats)),
            ("longest way", f"{placement.logic_ns:.1f} ns logic, {placement.routing_ns:.1f} ns routing"),
        ]
        note = (
            f"Look-up tables and flip-flops are those of {placement.yosys}; cells, pins and the clock are those of "
            f"{placement.placer}, after routing. Latency is from the first number of an example to its outputs."
        )
    return Table(title=f"The circuit on {circuit.device.name}", columns=("what", "figure"), rows=tuple(rows), note=note)


def conclusion(circuit: Circuit) -> str:
    """Return in whole sentences what the circuit does, and what limits it."""
    placement, ports = circuit.placement, circuit.ports
    if placement is None:
        return "The circuit was not placed: whether it fits and at which clock it runs is not known."
    pins = (
        f"An example enters in {ports.beats} cycles, since the package has no pins for all of its numbers at once: "
        "that limits the examples a second."
        if ports.beats > 1
        else "An example enters in each cycle: the clock alone limits the examples a second."
    )
    return (
        f"It answers {1e6 * placement.mhz / ports.beats:,.0f} examples a second with a latency of "
        f"{1000 * (ports.beats + ports.stages) / placement.mhz:.0f} ns on {circuit.device.name}. {pins} The clock is "
        f"limited by {placement.limited_by}. It is worth it where a processor is too slow to answer one example at a "
        "time, or needs too much power."
    )
