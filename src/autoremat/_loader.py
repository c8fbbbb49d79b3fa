"""Finds the model that a command line names: a preset, or ``file.py:function``.

The function takes no arguments, or any of ``batch`` and ``seq`` by name, and returns ``model, batch`` or
``model, batch, loss``.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from autoremat._errors import UsageError
from autoremat._presets import CAST_DTYPES, Built, build_preset
from autoremat._step import Precision


def load_model(
    name: str, *, batch: int | None = None, seq: int | None = None, precision: str | None = None, fake: bool = False
) -> Built:
    """Build the model that a command line names.

    Args:
        name: A preset, or ``path/to/file.py:function``.
        batch: Number of samples; None leaves it to the preset or the function.
        seq: Tokens in each; None leaves it to the preset or the function.
        precision: "fp32", "bf16" or "fp16" casts the whole model and its inputs; anything else leaves them.
        fake: Build presets without memory for weights. Functions always build real models.

    Raises:
        UsageError: If there is no such preset, file or function, or the function returns something else.
    """
    if ".py:" not in name:
        return build_preset(name, batch=batch, seq=seq, precision=precision, fake=fake)
    path, _, attribute = name.rpartition(":")
    function = _find_function(Path(path), attribute)
    given = {key: value for key, value in (("batch", batch), ("seq", seq)) if value is not None}
    built = _check(name, _call(name, function, given))
    cast = Precision.parse(precision if precision in CAST_DTYPES else None)
    return Built(model=built.model.to(cast.cast), batch=cast.cast_batch(built.batch), loss=built.loss)


def builder(name: str, *, precision: str | None = None) -> Callable[[int, int | None], tuple[nn.Module, Any]] | None:
    """A function that builds a model for a number of samples and tokens; None for a function that takes neither.

    Args:
        name: As for `load_model`.
        precision: As for `load_model`.
    """
    if ".py:" in name:
        path, _, attribute = name.rpartition(":")
        accepted = inspect.signature(_find_function(Path(path), attribute)).parameters
        if not {"batch", "seq"} <= set(accepted):
            return None

    def build(samples: int, tokens: int | None) -> tuple[nn.Module, Any]:
        built = load_model(name, batch=samples, seq=tokens, precision=precision, fake=True)
        return built.model, built.batch

    return build


def _find_function(path: Path, attribute: str) -> Callable[..., Any]:
    if not path.is_file():
        raise UsageError(f"No file {path}. A model is a preset or path/to/file.py:function.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))  # as `python file.py` does, so that its own imports work
    try:
        sys.modules[path.stem] = module  # classes defined in it must be found by copy and pickle
        spec.loader.exec_module(module)
    except Exception as error:
        sys.modules.pop(path.stem, None)
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise UsageError(f"{path} has no function {attribute!r}. It has: {', '.join(names) or 'none'}.")
    found: Callable[..., Any] = function
    return found


def _call(name: str, function: Callable[..., Any], given: dict[str, int]) -> Any:
    accepted = inspect.signature(function).parameters
    if extra := [key for key in given if key not in accepted]:
        options = ", ".join(f"--{key}" for key in extra)
        raise UsageError(f"{name} takes no {' and no '.join(extra)}: leave out {options}, or add the parameter.")
    try:
        return function(**given)
    except Exception as error:
        raise UsageError(f"{name} failed: {type(error).__name__}: {error}.") from error


def _check(name: str, result: Any) -> Built:
    parts = result if isinstance(result, tuple) else (result,)
    if len(parts) not in {2, 3} or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise UsageError(f"{name} returned ({kinds}). Return model, batch or model, batch, loss.")
    loss = parts[2] if len(parts) == 3 else None
    if loss is not None and not callable(loss):
        raise UsageError(f"{name} returned a loss of type {type(loss).__name__}. Return a function of the output.")
    return Built(model=parts[0], batch=parts[1], loss=loss)
