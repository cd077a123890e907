"""The results of advise."""

import dataclasses
import html
from typing import Iterator, List, Tuple


@dataclasses.dataclass(frozen=True)
class Choice:
    """A row of an :class:`Advice`: one way to train the output layer, with its measurements."""

    name: str
    """Sampler, number of samples, head and estimator, in words."""
    code: str
    """The line of code that creates this loss over the same table. It uses the user's ``loss``,
    ``counts``, and class weights as ``weight``. A comment for "as it is"."""
    ms: float
    """Milliseconds of a step of the loss. This is the forward and backward pass, including the
    gradient of the table and the step's share of a refresh, but not the optimizer."""
    bias: float
    """Relative distance of the mean gradient from the exact one. It is the root mean square of the
    values for input (``gradient_bias`` of :class:`Diagnosis`) and for the table."""
    noise: float
    """Relative root mean square distance of a gradient from the mean gradient, combined in the same
    way (``gradient_noise`` of :class:`Diagnosis`)."""
    error: float
    """The value by which rows are ranked; see :func:`advise`."""
    draws: int
    """The number of measured steps; 0 if the time was extrapolated from a part of the batch."""
    gradient: str
    """Whether the gradient of the table is "row-sparse" or "dense" for this batch. The optimizers
    of :mod:`xsoftmax.optim` support both. Empty if the table was not trained."""


@dataclasses.dataclass(frozen=True)
class Advice:
    """The result of :func:`advise`. ``print`` shows it as a table, a notebook as HTML."""

    rows: List[Choice]
    """The measured choices, best first."""
    budget_ms: float
    """The training time in milliseconds to which ``error`` refers."""
    queries: int
    """The number of queries for which gradients were compared."""
    threads: int
    """The number of threads during the measurement."""
    notes: List[str]
    """What was not measured, and why."""
    @property
    def best(self) -> Choice:
        """The best choice, which is the first row."""
        return self.rows[0]

    def _table(self) -> Iterator[Tuple[str, ...]]:
        yield "", "loss", "ms per step", "bias", "noise", "error", "gradient"
        for place, row in enumerate(self.rows, 1):
            ms = ("" if row.draws else "~") + f"{row.ms:.3g}"
            yield (str(place), row.name, ms, f"{row.bias:.3f}", f"{row.noise:.3f}",
                   f"{row.error:.3f}", row.gradient)

    def _heading(self) -> str:
        return (f"error of the gradient after {self.budget_ms:.3g} ms of training "
                f"({self.queries} queries, {self.threads} threads)")

    def __str__(self) -> str:
        table = list(self._table())
        widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
        lines = [
            f"{line[0]:>{widths[0]}}  {line[1]:<{widths[1]}}  " +
            "  ".join(f"{cell:>{width}}" for cell, width in zip(line[2:], widths[2:]))
            for line in table
        ]
        return "\n".join([self._heading(), *lines, *self.notes, "", self.best.code])

    def _repr_html_(self) -> str:
        def cells(tag: str, line: Tuple[str, ...]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>"
                                    for cell in line) + "</tr>"

        first, *body_rows = self._table()
        body = "".join(cells("td", line) for line in body_rows)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return (f"<p>{html.escape(self._heading())}</p><table><thead>{cells('th', first)}</thead>"
                f"<tbody>{body}</tbody></table>{notes}"
                f"<pre>{html.escape(self.best.code)}</pre>")
