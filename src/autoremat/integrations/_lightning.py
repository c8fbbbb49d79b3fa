"""Lightning under either of its names: ``lightning``, or ``pytorch_lightning`` alone.

Both packages have the same code. A trainer asks a callback for its methods and for nothing else, so one made from the
one works with a trainer of the other, too.
"""

from __future__ import annotations

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    from pytorch_lightning import Callback  # type: ignore[assignment]

__all__ = ["Callback"]
