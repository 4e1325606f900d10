"""What a split gives back to the one who ran it."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from sordino.shared.manifest import WeightBits


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """Figures of one split.

    Perplexity, KL (nats, original to quantised) and top-1 agreement (share) are means over ``tokens`` predicted tokens
    of the evaluation text, with integer weights and integer activations as in use. ``reference`` says what the
    original is. Sizes are bytes; ``x_max_min`` is the smallest activation bound of any group.
    """

    model_name: str
    reference: str
    weight_bits: WeightBits
    rounding: str
    perplexity_reference: float
    perplexity_quantised: float
    kl: float
    top1_agreement: float
    tokens: int
    groups: int
    weights_bytes: int
    client_bytes: int
    x_max_min: int
    seconds: float
    fingerprint: str

    def table(self) -> Table:
        """A table for the terminal."""
        table = Table(
            title=f"{self.model_name}: {self.weight_bits}-bit weights, rounding {self.rounding}", show_header=False
        )
        table.add_column(style="bold")
        table.add_column(justify="right", overflow="fold")  # a fingerprint is copied from here: whole
        for label, value in (
            ("reference", self.reference),
            ("perplexity, reference", f"{self.perplexity_reference:.3f}"),
            ("perplexity, quantised", f"{self.perplexity_quantised:.3f}"),
            ("mean KL divergence", f"{self.kl:.2e} nats"),
            ("top-1 agreement", f"{100 * self.top1_agreement:.1f} %"),
            ("measured on", f"{self.tokens:,} tokens"),
            ("groups", f"{self.groups:,}"),
            ("server weights", f"{self.weights_bytes / 2**20:,.1f} MiB"),
            ("client download", f"{self.client_bytes / 2**20:,.1f} MiB"),
            ("smallest activation bound", f"{self.x_max_min:,}"),
            ("time", f"{self.seconds:.1f} s"),
            ("fingerprint", self.fingerprint),
        ):
            table.add_row(label, value)
        return table
