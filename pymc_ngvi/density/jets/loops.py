"""The rule for loops: jets are carried from step to step."""

from collections.abc import Callable

import numpy as np

from pytensor.graph.basic import Apply, Variable
from pytensor.scan.op import Scan

from pymc_ngvi.core.values import AnyArray
from pymc_ngvi.density.jets.arrays import JetKind, NoJet, Space

#: Runs a step: from inputs to outputs.
type Step = Callable[[Space, list[AnyArray]], list[AnyArray]]
#: Translates a graph: from inputs, their kinds and outputs to what runs it, and the kinds of outputs.
type Translate = Callable[[list[Variable], list[JetKind], list[Variable]], tuple[Step, list[JetKind]]]


class Loop:
    """Runs a loop at all points.

    Parameters
    ----------
    node : Apply
        Of a Scan.
    kinds : list of JetKind
        Of its inputs.
    translate : callable

    Attributes
    ----------
    kinds : list of JetKind
        Of the outputs.

    Raises
    ------
    NoJet
        For loops that end when a condition is met, and those that PyTensor makes of derivatives.
    """

    def __init__(self, node: Apply, kinds: list[JetKind], translate: Translate) -> None:
        op: Scan = node.op
        info = op.info
        if info.as_while or info.n_mit_mot or info.n_untraced_sit_sot:
            raise NoJet(f"{op} is a loop of another sort")
        self._taps = [*info.mit_sot_in_slices, *info.sit_sot_in_slices]
        self._n_seqs, self._n_states = info.n_seqs, len(self._taps)
        self._n_collected = info.n_nit_sot
        first_state = 1 + info.n_seqs
        if kinds[0] is not JetKind.FIXED:
            raise NoJet("the number of steps depends on the point")
        states = kinds[first_state : first_state + self._n_states]
        seqs, others = kinds[1:first_state], kinds[first_state + self._n_states + self._n_collected :]
        inner = op.fgraph
        while True:
            given = [*seqs, *[k for k, taps in zip(states, self._taps, strict=True) for _ in taps], *others]
            self._step, found = translate(inner.inputs, given, inner.outputs)
            wider = [max(old, new) for old, new in zip(states, found[: self._n_states], strict=True)]
            if wider == states:
                break
            states = wider
        self.kinds = [*states, *found[self._n_states :]]

    def __call__(self, space: Space, *inputs: AnyArray) -> list[AnyArray]:
        """Return the outputs of the loop."""
        n_steps = int(inputs[0][0, 0])
        at = 1 + self._n_seqs
        seqs, buffers = inputs[1:at], inputs[at : at + self._n_states]
        others = inputs[at + self._n_states + self._n_collected :]
        states = [
            [self._as(space, buffer[:, :, k], kind) for k in range(-min(taps))]
            for buffer, taps, kind in zip(buffers, self._taps, self.kinds, strict=False)
        ]
        collected: list[list[AnyArray]] = [[] for _ in range(self._n_collected)]
        for t in range(n_steps):
            lagged = [past[tap] for past, taps in zip(states, self._taps, strict=True) for tap in taps]
            outputs = self._step(space, [*[seq[:, :, t] for seq in seqs], *lagged, *others])
            for past, out, kind in zip(states, outputs, self.kinds, strict=False):
                past.append(self._as(space, out, kind))
            for kept, out in zip(collected, outputs[self._n_states :], strict=True):
                kept.append(out)
        results = [self._filled(space, b, past, k) for b, past, k in zip(buffers, states, self.kinds, strict=False)]
        return results + [np.stack(kept, axis=2) for kept in collected]

    @staticmethod
    def _as(space: Space, x: AnyArray, kind: JetKind) -> AnyArray:
        """Return a state with the same axes at each step."""
        if kind is JetKind.JET:
            return space.lifted(x)
        return np.broadcast_to(x, (1, space.n_points, *x.shape[2:]))

    def _filled(self, space: Space, buffer: AnyArray, past: list[AnyArray], kind: JetKind) -> AnyArray:
        """Return the last states, as many as the buffer has room for."""
        length = buffer.shape[2]
        found = np.stack(past[-length:], axis=2)
        if len(past) >= length:
            return found
        rest = [self._as(space, buffer[:, :, k], kind) for k in range(len(past), length)]
        return np.concatenate([found, np.stack(rest, axis=2)], axis=2)
