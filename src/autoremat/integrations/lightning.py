"""Callbacks for Lightning's Trainer."""

from __future__ import annotations

from autoremat.integrations._lightning_enable import AutorematCallback
from autoremat.integrations._lightning_monitor import MonitorCallback

__all__ = ["AutorematCallback", "MonitorCallback"]
