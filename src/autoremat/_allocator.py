"""A model of torch's CUDA caching allocator: what a sequence of allocations makes it reserve. No torch here.

*Allocated* bytes are those of living blocks, each rounded up. *Reserved* bytes are what the allocator has taken from
the device to serve them, cached and split blocks included; they are what does or does not fit.

Source: the rules of ``c10/cuda/CUDACachingAllocator.cpp`` in torch 2.13, by the names used there (``round_size``,
``get_allocation_size``, ``get_free_block``, ``should_split``, ``try_merge_blocks``, ``try_allocate_expandable_block``,
``garbage_collect_cached_blocks``, ``release_available_cached_blocks``, ``release_cached_blocks``).

Known limits: one process and device; blocks used on other streams than their own return at once (torch waits for an
event); CUDA graphs' private pools, IPC and ``backend:cudaMallocAsync`` are not modelled. Among equal blocks the oldest
is taken, as in 2.13; some earlier versions take the one with the lowest address.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from autoremat._allocator_settings import (
    BLOCK_BYTES,
    DEFAULT_SETTINGS,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
)
from autoremat._errors import UsageError
from autoremat._results import AllocatorUsage, OutOfMemory

_ENDLESS_BYTES = 2**60
"""Address space of an expandable segment where the device has no stated size."""


class Allocate(NamedTuple):
    """A block is asked for. `key` names it until it is freed; 0 bytes take none."""

    key: Any
    num_bytes: int
    stream: int = 0


class Free(NamedTuple):
    """A block is given back."""

    key: Any


def simulate(
    events: Iterable[Allocate | Free],
    settings: AllocatorSettings = DEFAULT_SETTINGS,
    *,
    capacity_bytes: int | None = None,
) -> AllocatorUsage:
    """Run a sequence of allocations through the allocator.

    Args:
        events: In order. A key may be used again after it was freed.
        settings: How the allocator is set up.
        capacity_bytes: What the device can give; None for any amount.

    Returns:
        Peaks of allocated and reserved bytes, and what is unused at the latter. If memory runs out, what was up to
        then, with `AllocatorUsage.out_of_memory`.

    Raises:
        UsageError: If a key is allocated twice or freed without being allocated, or a fraction is set without a
            capacity.

    Example:
        >>> usage = simulate([Allocate("a", 3 * 2**20), Allocate("b", 5 * 2**20), Free("a")])
        >>> usage.allocated_bytes // 2**20, usage.reserved_bytes // 2**20
        (8, 20)
    """
    allocator = _Allocator(settings, capacity_bytes)
    for index, event in enumerate(events):
        if isinstance(event, Free):
            allocator.free(event.key)
        elif not allocator.allocate(event):
            failure = OutOfMemory(
                event=index,
                requested_bytes=event.num_bytes,
                allocated_bytes=allocator.allocated,
                reserved_bytes=allocator.reserved,
            )
            return allocator.usage(failure)
    return allocator.usage(None)


@dataclass(slots=True, eq=False)
class _Block:
    """A stretch of a segment; `order` is its age, by which equal blocks are chosen."""

    pool: _Pool
    address: int
    num_bytes: int
    order: int
    is_expandable: bool
    is_mapped: bool = True
    is_allocated: bool = False
    prev: _Block | None = None
    next: _Block | None = None
    requested_bytes: int = 0
    searches: int = 0

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    @property
    def reach_bytes(self) -> int:
        """Its size with the unmapped pages behind it."""
        behind = self.next
        return self.num_bytes + (behind.num_bytes if behind is not None and not behind.is_mapped else 0)


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of one stream, smallest first and oldest among equals; unmapped ones by address."""

    is_small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    unmapped: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)
    num_searches: int = 0

    def put(self, block: _Block) -> None:
        self.blocks[block.order] = block
        block.searches = self.num_searches
        if block.is_mapped:
            insort(self.free, (block.num_bytes, block.order))
        else:
            insort(self.unmapped, (block.address, block.order))

    def take(self, block: _Block) -> None:
        keys, key = (self.free, block.num_bytes) if block.is_mapped else (self.unmapped, block.address)
        del keys[bisect_left(keys, (key, block.order))]
        del self.blocks[block.order]

    def cached(self) -> list[_Block]:
        """Mapped free blocks, smallest first."""
        return [self.blocks[order] for _, order in self.free]


class _Allocator:
    """The allocator's state. Method names in brackets are the source's."""

    def __init__(self, settings: AllocatorSettings, capacity_bytes: int | None) -> None:
        self.settings = settings
        self.capacity = capacity_bytes
        self.limit: int | None = None
        if settings.memory_fraction < 1:
            if capacity_bytes is None:
                raise UsageError("memory_fraction is a share of the device: give capacity_bytes= too.")
            self.limit = int(settings.memory_fraction * capacity_bytes)
        self.collects = self.limit is not None and settings.garbage_collection_threshold > 0
        self.pools: dict[tuple[int, bool], _Pool] = {}
        self.live: dict[Any, _Block | None] = {}
        self.next_order = self.next_address = 0
        self.allocated = self.requested = self.reserved = 0
        self.num_segments = self.num_device_allocs = self.num_device_frees = self.num_retries = 0
        self.peak_allocated = self.peak_requested = self.peak_reserved = 0
        self.at_peak = (0, 0, 0)

    def allocate(self, event: Allocate) -> bool:
        """Serve a request (``malloc``); False if memory has run out."""
        key, num_bytes, stream = event
        if key in self.live:
            raise UsageError(f"Block {key!r} is allocated twice; free it first.")
        if num_bytes <= 0:
            self.live[key] = None
            return True
        size = self.settings.round_bytes(num_bytes)
        is_small = size <= SMALL_BYTES
        pool = self.pools.setdefault((stream, is_small), _Pool(is_small))
        before = self.peak_reserved
        block = self._find(pool, size) or self._acquire(pool, size)
        if block is None:
            return False
        self.live[key] = block = self._split(block, size)
        block.is_allocated, block.requested_bytes = True, num_bytes
        self.allocated += block.num_bytes
        self.requested += num_bytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_requested = max(self.peak_requested, self.requested)
        if self.peak_reserved > before:
            largest = max((p.free[-1][0] for p in self.pools.values() if p.free), default=0)
            self.at_peak = (self.reserved - self.allocated, largest, self.num_segments)
        return True

    def free(self, key: Any) -> None:
        """Take a block back and merge it with free neighbours (``free_block``)."""
        if key not in self.live:
            raise UsageError(f"Block {key!r} is freed but not allocated.")
        block = self.live.pop(key)
        if block is None:
            return
        self.allocated -= block.num_bytes
        self.requested -= block.requested_bytes
        block.is_allocated = False
        self._merge(block)
        block.pool.put(block)

    def usage(self, failure: OutOfMemory | None) -> AllocatorUsage:
        """What it came to."""
        unused, largest, segments = self.at_peak
        return AllocatorUsage(
            requested_bytes=self.peak_requested,
            allocated_bytes=self.peak_allocated,
            reserved_bytes=self.peak_reserved,
            unused_bytes=unused,
            largest_free_bytes=largest,
            num_segments=segments,
            num_device_allocs=self.num_device_allocs,
            num_device_frees=self.num_device_frees,
            num_retries=self.num_retries,
            out_of_memory=failure,
        )

    # -- blocks -------------------------------------------------------------------------------------------------

    def _new_block(self, pool: _Pool, address: int, num_bytes: int, *, is_expandable: bool) -> _Block:
        self.next_order += 1
        return _Block(pool, address, num_bytes, self.next_order, is_expandable)

    def _find(self, pool: _Pool, size: int) -> _Block | None:
        """The smallest free block that is large enough (``get_free_block``)."""
        if self.collects:
            pool.num_searches += 1
        index = bisect_left(pool.free, (size, -1))
        if index == len(pool.free):
            return None
        block = pool.blocks[pool.free[index][1]]
        if block.is_expandable:  # a block that can grow counts as large as it can become
            while index + 1 < len(pool.free):
                index += 1
                following = pool.blocks[pool.free[index][1]]
                if following.reach_bytes >= block.reach_bytes:
                    break
                block = following
        most = self.settings.max_split_bytes
        if most is not None and size < most <= block.num_bytes:
            return None
        if most is not None and size >= most and block.num_bytes >= size + self.settings.max_non_split_rounding_bytes:
            return None
        pool.take(block)
        return block

    def _split(self, block: _Block, size: int) -> _Block:
        """Cut a block to size if enough is left over (``should_split``, ``alloc_found_block``)."""
        left = block.num_bytes - size
        if block.pool.is_small or self.settings.expandable_segments:
            splits = left >= BLOCK_BYTES
        else:
            most = self.settings.max_split_bytes
            splits = left > SMALL_BYTES and (most is None or size < most)
        if not splits:
            return block
        head = self._new_block(block.pool, block.address, size, is_expandable=block.is_expandable)
        _link(block.prev, head, block)
        block.address += size
        block.num_bytes = left
        block.pool.put(block)
        return head

    def _merge(self, block: _Block) -> None:
        """Absorb neighbours that are as free as it is (``try_merge_blocks``); the block keeps its age."""
        for other in (block.prev, block.next):
            if other is None or other.is_allocated or other.is_mapped != block.is_mapped:
                continue
            other.pool.take(other)
            block.num_bytes += other.num_bytes
            if other is block.prev:
                block.address = other.address
                _link(other.prev, block, block.next)
            else:
                _link(block.prev, block, other.next)

    # -- segments -----------------------------------------------------------------------------------------------

    def _acquire(self, pool: _Pool, size: int) -> _Block | None:
        """A block of new memory, giving cached memory back if that is what it takes."""
        if self.collects:
            self._collect_garbage()
        block = self._reserve(pool, size)
        if block is None and self._release_available(pool, size):
            block = self._reserve(pool, size)
        if block is None:
            self._release_cached()
            self.num_retries += 1
            block = self._reserve(pool, size)
        return block

    def _reserve(self, pool: _Pool, size: int) -> _Block | None:
        """Take a segment, or pages, from the device (``alloc_block``)."""
        num_bytes = self.settings.segment_bytes(size)
        if self.limit is not None and self.reserved + num_bytes > self.limit:
            return None
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        if not self._grow(num_bytes):
            return None
        self.num_segments += 1
        self.next_address += num_bytes
        return self._new_block(pool, self.next_address - num_bytes, num_bytes, is_expandable=False)

    def _grow(self, num_bytes: int) -> bool:
        if self.capacity is not None and self.reserved + num_bytes > self.capacity:
            return False
        self.reserved += num_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.num_device_allocs += 1
        return True

    def _release(self, block: _Block) -> None:
        """Return an unsplit segment to the device (``release_block``)."""
        block.pool.take(block)
        self.reserved -= block.num_bytes
        self.num_segments -= 1
        self.num_device_frees += 1

    def _release_available(self, pool: _Pool, size: int) -> bool:
        """Return oversize cached blocks, only as many as are needed (``release_available_cached_blocks``)."""
        most = self.settings.max_split_bytes
        if most is None:
            return False
        needed = max(size, most)
        index = bisect_left(pool.free, (needed, -1))
        if index < len(pool.free):
            block = pool.blocks[pool.free[index][1]]
            if not block.is_expandable:
                self._release(block)
                return True
        released = 0
        for block in reversed(pool.cached()[:index]):
            if released >= needed or block.num_bytes < most:
                break
            if not block.is_expandable:
                released += block.num_bytes
                self._release(block)
        return released >= needed

    def _release_cached(self) -> None:
        """Return all that is free as a whole (``release_cached_blocks``); large pools first."""
        for pool in sorted(self.pools.values(), key=lambda pool: pool.is_small):
            for block in pool.cached():
                if block.is_expandable:
                    self._unmap(block)
                elif not block.is_split:
                    self._release(block)

    def _collect_garbage(self) -> None:
        """Return old cached segments until below the threshold (``garbage_collect_cached_blocks``)."""
        assert self.limit is not None
        target = self.reserved - int(self.settings.garbage_collection_threshold * self.limit)
        large = [b for pool in self.pools.values() if not pool.is_small for b in pool.cached() if not b.is_split]
        ages = {b.order: b.pool.num_searches - b.searches for b in large}
        total, count, reclaimed, is_freeing = sum(ages.values()), len(large), 0, True
        while target > reclaimed and is_freeing and count > 0:
            threshold = total / count
            is_freeing = False
            for block in list(large):
                if not block.is_expandable and ages[block.order] >= threshold:
                    is_freeing = True
                    reclaimed += block.num_bytes
                    total -= ages[block.order]
                    count -= 1
                    large.remove(block)
                    self._release(block)

    # -- expandable segments ------------------------------------------------------------------------------------

    def _expand(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages behind a free block until it is large enough (``try_allocate_expandable_block``)."""
        block = self._find_expandable(pool, size)
        if not block.is_mapped and not self._map(block, min(block.num_bytes, size)):
            return None
        while block.num_bytes < size:
            behind = block.next
            assert behind is not None
            if not self._map(behind, min(size - block.num_bytes, behind.num_bytes)):
                return None
            block = behind
        pool.take(block)
        return block

    def _find_expandable(self, pool: _Pool, size: int) -> _Block:
        """The lowest address with room for it, mapped or not; a new segment if there is none."""
        for _, order in pool.unmapped:
            start = pool.blocks[order]
            if start.prev is not None and not start.prev.is_allocated:
                start = start.prev
            if _room_bytes(start, size) >= size:
                return start
        page = self._page_bytes(pool)
        whole = _ENDLESS_BYTES if self.capacity is None else self.capacity + self.capacity // 8
        start_address = -(-self.next_address // page) * page
        segment = self._new_block(pool, start_address, -(-whole // page) * page, is_expandable=True)
        segment.is_mapped = False
        self.next_address = start_address + segment.num_bytes
        self.num_segments += 1
        pool.put(segment)
        return segment

    def _page_bytes(self, pool: _Pool) -> int:
        return SMALL_SEGMENT_BYTES if pool.is_small else self.settings.large_segment_bytes

    def _map(self, block: _Block, size: int) -> bool:
        """Back the start of an unmapped block with pages (``map_block``)."""
        page = self._page_bytes(block.pool)
        mapped = -(-size // page) * page
        if not self._grow(mapped):
            return False
        block.pool.take(block)
        block.is_mapped = True
        if mapped < block.num_bytes:
            rest = self._new_block(block.pool, block.address + mapped, block.num_bytes - mapped, is_expandable=True)
            rest.is_mapped = False
            _link(block, rest, block.next)
            block.pool.put(rest)
            block.num_bytes = mapped
        self._merge(block)
        block.pool.put(block)
        return True

    def _unmap(self, block: _Block) -> None:
        """Return the whole pages of a free block (``unmap_block``); what is left of others stays mapped."""
        page, pool, end = self._page_bytes(block.pool), block.pool, block.address + block.num_bytes
        first, last = -(-block.address // page) * page, end // page * page
        if first >= last:
            return
        pool.take(block)
        if first > block.address:
            before = self._new_block(pool, block.address, first - block.address, is_expandable=True)
            _link(block.prev, before, block)
            pool.put(before)
        if end > last:
            after = self._new_block(pool, last, end - last, is_expandable=True)
            _link(block, after, block.next)
            pool.put(after)
        block.address, block.num_bytes, block.is_mapped = first, last - first, False
        self.reserved -= block.num_bytes
        self.num_device_frees += 1
        self._merge(block)
        if block.is_split:
            pool.put(block)
        else:
            self.num_segments -= 1


def _room_bytes(block: _Block | None, enough: int) -> int:
    """Bytes from a block on that are not allocated, mapped or not; counted up to what is enough."""
    room = 0
    while block is not None and not block.is_allocated and room < enough:
        room, block = room + block.num_bytes, block.next
    return room


def _link(prev: _Block | None, block: _Block, following: _Block | None) -> None:
    block.prev, block.next = prev, following
    if prev is not None:
        prev.next = block
    if following is not None:
        following.prev = block
