"""Callbacks for Transformers' Trainer, and for trainers made from it."""

from __future__ import annotations

from autoremat.integrations._trainer_enable import AutorematCallback
from autoremat.integrations._trainer_monitor import MonitorCallback

__all__ = ["AutorematCallback", "MonitorCallback"]
