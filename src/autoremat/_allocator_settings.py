"""Settings of torch's CUDA caching allocator, as ``PYTORCH_ALLOC_CONF`` states them, and its constants. No torch here.

Source: ``c10/core/AllocatorConfig.{h,cpp}`` and ``c10/cuda/CUDAAllocatorConfig.cpp`` in torch 2.13; constants carry the
source's name beside them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from autoremat._errors import UsageError

MIB = 2**20
BLOCK_BYTES = 512
"""``kMinBlockSize``: blocks are multiples of this."""
SMALL_BYTES = MIB
"""``kSmallSize``: the largest block of the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""``kSmallBuffer``: segment, and page of an expandable segment, of the small pool."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""``large_segment_size``: the same of the large pool."""
OWN_SEGMENT_BYTES = 10 * MIB
"""``kMinLargeAlloc``: from here on an allocation has a segment of its own size."""
ROUND_SEGMENT_BYTES = 2 * MIB
"""``kRoundLarge``: what such segments are rounded up to."""
_NUM_INTERVALS = 16
"""``kRoundUpPowerOfTwoIntervals``: powers of two from 1 MiB to 64 GiB."""
_KEYS = (
    "expandable_segments",
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "large_segment_size_mb",
    "roundup_power2_divisions",
    "garbage_collection_threshold",
    "per_process_memory_fraction",
)
_IGNORED_KEYS = re.compile(r"pinned_\w+|release_lock_on_\w+|graph_capture_record_stream_reuse|throw_on_cudamalloc_oom")
"""Settings that change no device allocation of one stream outside of CUDA graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """How the allocator is set up; the defaults are torch's.

    Attributes:
        expandable_segments: Grow one segment by pages instead of taking a new one for each need.
        max_split_bytes: Blocks of this size or more are not split; None splits all.
        max_non_split_rounding_bytes: How much larger than asked for such a block may be.
        large_segment_bytes: Segment of the large pool for requests below 10 MiB.
        roundup_power2_divisions: Steps between powers of two to which sizes round up, for each power of two from 1 MiB
            (16 numbers); 0 or 1 for none.
        garbage_collection_threshold: Share of the memory limit beyond which old cached blocks are returned; 0 for
            never. Works only with a `memory_fraction` below 1.
        memory_fraction: Share of the device that this process may reserve.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = (0,) * _NUM_INTERVALS
    garbage_collection_threshold: float = 0.0
    memory_fraction: float = 1.0

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Read a setting of ``PYTORCH_ALLOC_CONF`` (or ``PYTORCH_CUDA_ALLOC_CONF``).

        Args:
            text: ``"key:value,key:value"``, as torch reads it. Settings of pinned memory and locks are accepted and
                change nothing here.

        Raises:
            UsageError: For an unknown key or a value that torch would refuse; names both.

        Example:
            >>> AllocatorSettings.parse("expandable_segments:True, max_split_size_mb:128").max_split_bytes
            134217728
        """
        values = _split_settings(text)
        large = _megabytes(values, "large_segment_size_mb", least=OWN_SEGMENT_BYTES + MIB) or LARGE_SEGMENT_BYTES
        rounding = _megabytes(values, "max_non_split_rounding_mb", least=large)
        parsed = cls(
            expandable_segments=_boolean(values, "expandable_segments"),
            max_split_bytes=_megabytes(values, "max_split_size_mb", least=large),
            max_non_split_rounding_bytes=large if rounding is None else rounding,
            large_segment_bytes=large,
            roundup_power2_divisions=_divisions(values.pop("roundup_power2_divisions", "")),
            garbage_collection_threshold=_share(values, "garbage_collection_threshold", default=0.0),
            memory_fraction=_share(values, "per_process_memory_fraction", default=1.0),
        )
        if values.pop("backend", "native") != "native":
            raise UsageError("Allocator setting 'backend': only 'native' is modelled; cudaMallocAsync is the driver's.")
        unknown = [key for key in values if not _IGNORED_KEYS.fullmatch(key)]
        if unknown:
            raise UsageError(f"Allocator setting {unknown[0]!r} is not known. Use: {', '.join(_KEYS)}.")
        return parsed

    def to_text(self) -> str:
        """What `parse` reads as these settings: those that are not torch's defaults, "" if all are.

        Example:
            >>> AllocatorSettings(expandable_segments=True, max_split_bytes=128 * MIB).to_text()
            'expandable_segments:True,max_split_size_mb:128'
        """
        megabytes = {
            "max_split_size_mb": self.max_split_bytes,
            "large_segment_size_mb": None
            if self.large_segment_bytes == LARGE_SEGMENT_BYTES
            else self.large_segment_bytes,
            "max_non_split_rounding_mb": None
            if self.max_non_split_rounding_bytes == self.large_segment_bytes
            else self.max_non_split_rounding_bytes,
        }
        parts = ["expandable_segments:True"] if self.expandable_segments else []
        parts += [f"{key}:{value // MIB}" for key, value in megabytes.items() if value is not None]
        if any(self.roundup_power2_divisions):
            steps = (f"{1 << power}:{value}" for power, value in enumerate(self.roundup_power2_divisions))
            parts.append(f"roundup_power2_divisions:[{','.join(steps)}]")
        if self.garbage_collection_threshold:
            parts.append(f"garbage_collection_threshold:{self.garbage_collection_threshold}")
        if self.memory_fraction < 1:
            parts.append(f"per_process_memory_fraction:{self.memory_fraction}")
        return ",".join(parts)

    def round_bytes(self, num_bytes: int) -> int:
        """Size of the block that serves a request (``round_size``).

        Example:
            >>> AllocatorSettings().round_bytes(513)
            1024
        """
        if num_bytes < BLOCK_BYTES:
            return BLOCK_BYTES
        power = num_bytes.bit_length() - 1
        divisions = self.roundup_power2_divisions[min(max(power - 20, 0), _NUM_INTERVALS - 1)]
        step = BLOCK_BYTES
        if divisions > 1 and num_bytes > BLOCK_BYTES * divisions:
            step = (1 << power) // divisions
        return -(-num_bytes // step) * step

    def segment_bytes(self, num_bytes: int) -> int:
        """Size of a new segment for a rounded request (``get_allocation_size``)."""
        if num_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if num_bytes < OWN_SEGMENT_BYTES:
            return self.large_segment_bytes
        return -(-num_bytes // ROUND_SEGMENT_BYTES) * ROUND_SEGMENT_BYTES


DEFAULT_SETTINGS = AllocatorSettings()
"""What torch does without any setting."""


def _split_settings(text: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for item in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)):
        key, colon, value = item.partition(":")
        if not item:
            continue
        if not colon or not value:
            raise UsageError(f"Cannot read allocator setting {item!r}: write key:value, separated by commas.")
        values[key] = value
    return values


def _megabytes(values: dict[str, str], key: str, *, least: int) -> int | None:
    text = values.pop(key, None)
    if text is None:
        return None
    if not text.isdecimal() or int(text) * MIB < least:
        raise UsageError(f"Allocator setting {key}:{text} must be a whole number of MiB, at least {least // MIB}.")
    return int(text) * MIB


def _boolean(values: dict[str, str], key: str) -> bool:
    text = values.pop(key, "False")
    if text not in ("True", "False"):
        raise UsageError(f"Allocator setting {key}:{text} must be True or False.")
    return text == "True"


def _share(values: dict[str, str], key: str, *, default: float) -> float:
    text = values.pop(key, None)
    if text is None:
        return default
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1 or (share == 1 and key == "garbage_collection_threshold"):
        raise UsageError(f"Allocator setting {key}:{text} must be a share of 1 above 0.")
    return share


def _divisions(text: str) -> tuple[int, ...]:
    """``"4"`` for all sizes, or ``"[256:1,512:2,>:8]"`` by power of two in MiB (``parseRoundUpPower2Divisions``)."""
    table = [0] * _NUM_INTERVALS
    if not text.startswith("["):
        return tuple([_power_of_two(text, text)] * _NUM_INTERVALS) if text else tuple(table)
    last = -1
    for item in text.strip("[]").split(","):
        boundary, _, value = item.partition(":")
        divisions = 0 if value == "0" else _power_of_two(value, text)
        if boundary == ">":
            table[last + 1 :] = [divisions] * (_NUM_INTERVALS - last - 1)
            continue
        index = min(_power_of_two(boundary, text).bit_length() - 1, _NUM_INTERVALS - 1)
        if last < 0:
            table[:index] = [divisions] * index
        table[index], last = divisions, index
    return tuple(table)


def _power_of_two(text: str, whole: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value <= 0 or value & (value - 1):
        raise UsageError(f"Allocator setting roundup_power2_divisions:{whole}: {text!r} must be a power of two.")
    return value
