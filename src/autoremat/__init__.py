"""Automatic activation checkpointing for PyTorch."""
