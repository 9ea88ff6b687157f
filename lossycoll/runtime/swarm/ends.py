"""What a peer has by one of its numbers. By another it has all of it anew."""

from __future__ import annotations

from dataclasses import dataclass

from lossycoll.runtime.engine.out_of_band import Place

from .knocker import Knocker
from .lending import Lending
from .paths import Paths


@dataclass(frozen=True, slots=True)
class End:
    """``place``: of the engine's socket, as this machine sees it."""

    place: Place
    knocker: Knocker
    paths: Paths
    lending: Lending

    def close(self) -> None:
        """Others may have to ask for packets no more. Idempotent."""
        self.knocker.close()
        self.lending.close()
        self.paths.close()
