"""Programs made of programs: with numbers in the place of inputs, and of derivatives."""

from collections.abc import Sequence

from pymc_ngvi.rows.programs.program import RowProgram
from pymc_ngvi.rows.programs.writer import Writer, Written


def rewritten(program: RowProgram, numbers: Sequence[float | None] = ()) -> tuple[Writer, list[Written]]:
    """Write a program once more."""
    numbers = numbers or [None] * program.n_inputs
    kept = [k for k, number in enumerate(numbers) if number is None]
    writer = Writer(len(kept), [at for at, k in enumerate(kept) if k in program.conditions])
    inputs = iter(writer.inputs)
    values = [next(inputs) if number is None else writer.constant(number) for number in numbers]
    values += [writer.constant(number) for number in program.constants]
    for call in program.calls:
        values.append(writer.call(call.name, *[values[k] for k in call.read]))
    return writer, [values[k] for k in program.outputs]


def firsts(program: RowProgram, n_first: int) -> tuple[RowProgram, list[int]]:
    """Return the only output with its derivatives by the first inputs that are not 0 everywhere, and by which."""
    writer, [value] = rewritten(program)
    slopes = {a: slope for a in range(n_first) if (slope := writer.slope(value, writer.inputs[a])) is not None}
    return writer.written([value, *slopes.values()]), list(slopes)


def seconds(program: RowProgram, n_first: int) -> tuple[RowProgram, list[tuple[int, int]]]:
    """Return the second derivatives of the only output by the first inputs."""
    writer, [value] = rewritten(program)
    pairs, found = [], []
    for a in range(n_first):
        slope = writer.slope(value, writer.inputs[a])
        for b in range(a + 1) if slope is not None else ():
            assert slope is not None
            second = writer.slope(slope, writer.inputs[b])
            if second is not None:
                pairs.append((a, b))
                found.append(second)
    return writer.written(found), pairs
