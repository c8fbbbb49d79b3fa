"""The model of the CUDA caching allocator: documented rules by hand, properties, and a naive reference."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoremat import UsageError
from autoremat._allocator import Allocate, Free, _Allocator, simulate
from autoremat._allocator_settings import DEFAULT_SETTINGS, AllocatorSettings

KIB, MIB, GIB = 2**10, 2**20, 2**30
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def run(*steps, setup=DEFAULT_SETTINGS, capacity=None):
    """Numbers allocate that many bytes under the next letter; letters free."""
    names = iter("abcdefghijklmnopqrstuvwxyz")
    events = [Free(step) if isinstance(step, str) else Allocate(next(names), step) for step in steps]
    return simulate(events, setup, capacity_bytes=capacity)


# -- rounding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "block"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512), (3 * MIB - 1, 3 * MIB)]
)
def test_blocks_are_multiples_of_512_bytes(asked, block):
    assert AllocatorSettings().round_bytes(asked) == block
    assert run(asked).allocated_bytes == block
    assert run(asked).requested_bytes == asked


def test_power_of_two_divisions_round_further():
    quarter = AllocatorSettings.parse("roundup_power2_divisions:4")
    assert quarter.round_bytes(1200 * MIB) == 1280 * MIB  # between 1024 and 2048 in steps of 256
    assert quarter.round_bytes(1024 * MIB) == 1024 * MIB
    assert quarter.round_bytes(5 * KIB // 2) == 5 * KIB // 2  # the source's own example: 1024 < 2560 in steps of 512
    assert quarter.round_bytes(1200) == 1536  # not above 4 * 512 bytes: by 512
    by_size = AllocatorSettings.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    assert by_size.roundup_power2_divisions == (*[1] * 9, 2, 4, *[8] * 5)
    assert by_size.round_bytes(600 * MIB) == 768 * MIB
    assert by_size.round_bytes(255 * MIB + 1) == 255 * MIB + 512
    assert AllocatorSettings.parse("roundup_power2_divisions:[64:8,1024:4]").roundup_power2_divisions[7] == 0


def test_nothing_is_taken_for_no_bytes():
    assert run(0, "a").reserved_bytes == 0


# -- segments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_the_segment_for_a_request(asked, segment):
    usage = run(asked)
    assert usage.reserved_bytes == segment
    assert usage.num_device_allocs == usage.num_segments == 1


def test_small_requests_share_a_segment_until_it_is_full():
    assert run(MIB, MIB).reserved_bytes == 2 * MIB
    assert run(MIB, MIB, 1).reserved_bytes == 4 * MIB
    assert run(512 * KIB, MIB, 512 * KIB).reserved_bytes == 2 * MIB


def test_small_and_large_requests_never_share():
    usage = run(5 * MIB, KIB)  # 15 MiB are free in the large pool
    assert usage.reserved_bytes == 22 * MIB
    assert usage.num_segments == 2


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_is_left():
    assert run(19 * MIB, "a", 9 * MIB, 9 * MIB).reserved_bytes == 20 * MIB  # 20 MiB: cut into 9, 9 and 2
    assert run(19 * MIB).allocated_bytes == 20 * MIB  # its segment has 20 MiB: the last one is not cut off
    assert run(19 * MIB - 512).allocated_bytes == 19 * MIB - 512


def test_a_small_block_is_split_from_512_bytes_on():
    usage = run(MIB, MIB - 512, 512)
    assert usage.reserved_bytes == 2 * MIB
    assert usage.allocated_bytes == 2 * MIB


def test_the_smallest_block_that_fits_is_taken():
    # Two cached segments of 40 and 30 MiB: the 25 MiB request takes the second, so that the 40 MiB one serves the last.
    assert run(40 * MIB, 30 * MIB, "a", "b", 25 * MIB, 40 * MIB).reserved_bytes == 70 * MIB


def test_among_equal_blocks_the_oldest_is_taken():
    allocator = _Allocator(AllocatorSettings(), None)
    for key in "ab":
        allocator.allocate(Allocate(key, 30 * MIB))
    first = allocator.live["a"]
    allocator.free("b")
    allocator.free("a")
    allocator.allocate(Allocate("c", 30 * MIB))
    assert allocator.live["c"] is first


def test_free_neighbours_merge():
    # Three blocks fill a segment. Freed in any order they are one block again, which a fourth request needs.
    for order in itertools.permutations("abc"):
        usage = run(6 * MIB, 6 * MIB, 8 * MIB, *order, 20 * MIB)
        assert usage.reserved_bytes == 20 * MIB
    assert run(6 * MIB, 6 * MIB, 8 * MIB, "a", "c", 9 * MIB).reserved_bytes == 40 * MIB  # not neighbours


def test_what_is_unused_at_the_peak():
    usage = run(6 * MIB, 6 * MIB, 8 * MIB, "a", "c", 9 * MIB)
    assert usage.unused_bytes == 40 * MIB - 15 * MIB
    assert usage.largest_free_bytes == 11 * MIB
    assert usage.fragmentation_bytes == 40 * MIB - 20 * MIB
    assert "reserved 40.0 MiB for 20.0 MiB allocated" in repr(usage)


def test_streams_do_not_share_blocks():
    events = [Allocate("a", 30 * MIB, 0), Free("a"), Allocate("b", 30 * MIB, 7)]
    assert simulate(events).reserved_bytes == 60 * MIB


# -- max_split_size_mb ------------------------------------------------------------------------------------------


def test_oversize_blocks_are_kept_for_oversize_requests():
    setup = AllocatorSettings.parse("max_split_size_mb:64")
    assert run(100 * MIB, "a", 30 * MIB, setup=setup).reserved_bytes == 130 * MIB
    assert run(100 * MIB, "a", 30 * MIB).reserved_bytes == 100 * MIB
    near = run(100 * MIB, "a", 81 * MIB, setup=setup)  # within 20 MiB: taken whole
    assert near.reserved_bytes == 100 * MIB
    assert near.allocated_bytes == 100 * MIB
    assert run(100 * MIB, "a", 80 * MIB, setup=setup).reserved_bytes == 180 * MIB
    wider = AllocatorSettings.parse("max_split_size_mb:64,max_non_split_rounding_mb:21")
    assert run(100 * MIB, "a", 80 * MIB, setup=wider).reserved_bytes == 100 * MIB


def test_out_of_memory_frees_only_as_many_oversize_blocks_as_are_needed():
    setup = AllocatorSettings.parse("max_split_size_mb:64")
    usage = run(100 * MIB, 200 * MIB, 70 * MIB, "a", "b", "c", 150 * MIB, setup=setup, capacity=400 * MIB)
    # No block is taken (200 MiB is over 150 + 20): the smallest block of at least 150 MiB goes back, nothing else.
    assert usage.num_device_frees == 1
    assert usage.num_retries == 0
    several = run(100 * MIB, 90 * MIB, 70 * MIB, "a", "b", "c", 150 * MIB, setup=setup, capacity=300 * MIB)
    assert several.num_device_frees == 2  # the largest first: 100 + 90 are enough
    exact = run(80 * MIB, 70 * MIB, 64 * MIB, "a", "b", "c", 150 * MIB, setup=setup, capacity=300 * MIB)
    assert exact.num_device_frees == 2
    assert several.out_of_memory is None


# -- out of memory ----------------------------------------------------------------------------------------------


def test_cached_segments_are_returned_before_memory_runs_out():
    usage = run(60 * MIB, "a", 80 * MIB, capacity=100 * MIB)
    assert usage.out_of_memory is None
    assert usage.num_retries == usage.num_device_frees == 1
    assert usage.reserved_bytes == 80 * MIB


def test_segments_in_part_in_use_are_not_returned():
    usage = run(40 * MIB, "a", 10 * MIB, 80 * MIB, capacity=100 * MIB)  # 10 of 40 MiB are in use
    failure = usage.out_of_memory
    assert failure is not None
    assert (failure.event, failure.requested_bytes) == (3, 80 * MIB)
    assert (failure.allocated_bytes, failure.reserved_bytes) == (10 * MIB, 40 * MIB)
    assert run(40 * MIB, "a", 10 * MIB, 80 * MIB, setup=EXPANDABLE, capacity=100 * MIB).out_of_memory is None
    assert "out of memory" in repr(usage)


def test_a_memory_fraction_limits_what_is_reserved():
    half = AllocatorSettings.parse("per_process_memory_fraction:0.5")
    assert run(60 * MIB, setup=half, capacity=100 * MIB).out_of_memory is not None
    assert run(50 * MIB, setup=half, capacity=100 * MIB).out_of_memory is None
    with pytest.raises(UsageError, match="capacity_bytes"):
        run(1, setup=half)


def test_garbage_is_collected_beyond_the_threshold():
    setup = AllocatorSettings.parse("garbage_collection_threshold:0.5,per_process_memory_fraction:0.8")
    # Limit 400 MiB, threshold 200. When the last request comes 250 are reserved, 50 and 60 of them free for 4 and 3
    # searches: those of more than the average age (3.5) go back, which is enough.
    steps = (50 * MIB, "a", 60 * MIB, "b", 70 * MIB, 70 * MIB, 90 * MIB)
    usage = run(*steps, setup=setup, capacity=500 * MIB)
    assert usage.num_device_frees == 1
    assert usage.num_retries == 0
    assert usage.reserved_bytes == 290 * MIB
    assert run(*steps[:-1], setup=setup, capacity=500 * MIB).num_device_frees == 0
    alike = run(150 * MIB, 90 * MIB, "a", "b", 160 * MIB, setup=setup, capacity=500 * MIB)
    assert alike.num_device_frees == 2  # of one age, and collecting does not stop in the middle of an age
    without = AllocatorSettings.parse("garbage_collection_threshold:0.5")
    assert run(*steps, setup=without, capacity=500 * MIB).num_device_frees == 0


# -- expandable segments ----------------------------------------------------------------------------------------


def test_an_expandable_segment_grows_by_pages():
    assert run(MIB + 512, setup=EXPANDABLE).reserved_bytes == 20 * MIB
    assert run(21 * MIB, setup=EXPANDABLE).reserved_bytes == 40 * MIB
    usage = run(21 * MIB, 18 * MIB, 2 * MIB, setup=EXPANDABLE)  # 39 MiB fit, then 1 MiB left and a third page
    assert usage.reserved_bytes == 60 * MIB
    assert usage.num_segments == 1
    assert usage.num_device_allocs == 2
    assert run(KIB, setup=EXPANDABLE).reserved_bytes == 2 * MIB


def test_expandable_blocks_are_split_from_512_bytes_on():
    assert run(20 * MIB, "a", 19 * MIB, setup=EXPANDABLE).num_device_allocs == 1
    usage = run(19 * MIB + 512 * KIB, 2 * MIB, setup=EXPANDABLE)
    assert usage.reserved_bytes == 40 * MIB  # the 0.5 MiB at the end serve the second request together with a new page
    assert usage.allocated_bytes == 21 * MIB + 512 * KIB


def test_growing_requests_fragment_cached_segments_but_not_an_expandable_one():
    steps = []
    for index, size in enumerate(range(30, 60, 5)):
        steps += [size * MIB, "abcdefghij"[index]]
    assert run(*steps).reserved_bytes == sum(range(30, 60, 5)) * MIB + 3 * MIB  # odd sizes round to 2 MiB
    assert run(*steps, setup=EXPANDABLE).reserved_bytes == 60 * MIB


def test_a_block_that_can_grow_is_the_last_choice():
    # Free: 30 MiB in the middle, 15 MiB at the end that can grow. A 12 MiB request takes the 30 MiB block.
    allocator = _Allocator(EXPANDABLE, None)
    for key, size in (("a", 30), ("b", 35), ("c", 10)):
        allocator.allocate(Allocate(key, size * MIB))
    allocator.free("a")
    start = allocator.pools[0, False].blocks
    assert sorted(block.num_bytes for block in start.values() if block.is_mapped) == [5 * MIB, 30 * MIB]
    allocator.allocate(Allocate("d", 4 * MIB))
    assert allocator.live["d"].address == 0


def test_whole_free_pages_are_unmapped_when_memory_is_short():
    # Large pages: 50 MiB free (pages 1-2 whole, half of page 3 in use); the small pool needs 2 MiB.
    usage = run(50 * MIB, 5 * MIB, "a", KIB, setup=EXPANDABLE, capacity=61 * MIB)
    assert usage.out_of_memory is None
    assert usage.num_device_frees == 1
    again = run(50 * MIB, 5 * MIB, "a", KIB, 38 * MIB, setup=EXPANDABLE, capacity=63 * MIB)
    assert again.out_of_memory is None  # the unmapped pages are mapped again, at the lowest address


def test_pages_in_part_in_use_stay_mapped():
    allocator = _Allocator(EXPANDABLE, 100 * MIB)
    for key, size in (("a", 5), ("b", 50), ("c", 5)):
        allocator.allocate(Allocate(key, size * MIB))
    allocator.free("b")  # 5 to 55 of 60 MiB: the page from 20 to 40 is free as a whole
    allocator._release_cached()
    check_blocks(allocator)
    assert allocator.reserved == 40 * MIB
    assert [(b.address // MIB, b.num_bytes // MIB) for b in allocator.pools[0, False].cached()] == [(5, 15), (40, 15)]


# -- misuse -----------------------------------------------------------------------------------------------------


def test_wrong_sequences_are_refused():
    with pytest.raises(UsageError, match="twice"):
        simulate([Allocate("a", 1), Allocate("a", 1)])
    with pytest.raises(UsageError, match="not allocated"):
        simulate([Free("a")])


# -- properties -------------------------------------------------------------------------------------------------


class Naive:
    """The same rules without out-of-memory, written down as lists that are searched from end to end."""

    def __init__(self, *, expandable):
        self.expandable = expandable
        self.pools = {True: [], False: []}
        self.where = {}
        self.age = self.reserved = 0

    def block(self, size, used=None, age=None):
        if age is None:
            self.age += 1
            age = self.age
        return {"size": size, "used": used, "age": age}

    def allocate(self, key, num_bytes):
        size = max(512, -(-num_bytes // 512) * 512)
        small = size <= MIB
        found = self.best(self.pools[small], size) or self.new_segment(small, size)
        segment, position = found
        block = segment[position]
        left = block["size"] - size
        if left >= 512 if small or self.expandable else left > MIB:
            block["size"] = left
            segment.insert(position, self.block(size))
        segment[position]["used"] = key
        self.where[key] = segment

    def best(self, pool, size):
        fits = [
            (segment is pool[-1] and self.expandable and index == len(segment) - 1, b["size"], b["age"], segment, index)
            for segment in pool
            for index, b in enumerate(segment)
            if b["used"] is None and b["size"] >= size
        ]
        return min(fits, key=lambda fit: fit[:3])[3:] if fits else None

    def new_segment(self, small, size):
        pool = self.pools[small]
        page = 2 * MIB if small else 20 * MIB
        if self.expandable:
            if not pool:
                pool.append([])
                self.space = getattr(self, "space", {})
                self.space[small] = self.block(0)["age"]
            segment = pool[0]
            have = segment.pop()["size"] if segment and segment[-1]["used"] is None else 0
            grown = -(-(size - have) // page) * page
            self.reserved += grown
            segment.append(self.block(have + grown, age=self.space[small]))
            self.space[small] = self.block(0)["age"]
            return segment, len(segment) - 1
        num_bytes = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        self.reserved += num_bytes
        pool.append([self.block(num_bytes)])
        return pool[-1], 0

    def free(self, key):
        segment = self.where.pop(key)
        position = next(i for i, b in enumerate(segment) if b["used"] == key)
        segment[position]["used"] = None
        for other in (position + 1, position - 1):
            if 0 <= other < len(segment) and segment[other]["used"] is None:
                segment[position]["size"] += segment[other]["size"]
                del segment[other]
                position = min(position, other)

    def sizes(self):
        return {b["used"]: b["size"] for pool in self.pools.values() for s in pool for b in s if b["used"] is not None}


@st.composite
def sequences(draw):
    """Allocations of all kinds of sizes, freed in any order; some are never freed."""
    size = st.one_of(
        st.integers(1, 4 * KIB),
        st.integers(KIB, MIB),
        st.integers(1, 60).map(lambda n: n * MIB // 2),
        st.sampled_from([MIB, MIB + 1, 10 * MIB - 512, 10 * MIB, 20 * MIB, 21 * MIB]),
    )
    events, live = [], []
    for key in range(draw(st.integers(1, 30))):
        events.append(Allocate(key, draw(size)))
        live.append(key)
        for _ in range(draw(st.integers(0, min(3, len(live))))):
            events.append(Free(live.pop(draw(st.integers(0, len(live) - 1)))))
    return events


@given(sequences(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_naive_reference_agrees(events, expandable):
    allocator, naive = _Allocator(AllocatorSettings(expandable_segments=expandable), None), Naive(expandable=expandable)
    for event in events:
        if isinstance(event, Free):
            allocator.free(event.key)
            naive.free(event.key)
        else:
            assert allocator.allocate(event)
            naive.allocate(event.key, event.num_bytes)
        assert allocator.reserved == naive.reserved
        assert {key: block.num_bytes for key, block in allocator.live.items()} == naive.sizes()


@given(sequences(), st.booleans(), st.sampled_from([None, 40 * MIB, 200 * MIB]), st.sampled_from([None, 20 * MIB]))
@settings(max_examples=200, deadline=None)
def test_blocks_tile_their_segments_at_every_moment(events, expandable, capacity, most):
    setup = AllocatorSettings(expandable_segments=expandable, max_split_bytes=most)
    allocator = _Allocator(setup, capacity)
    for event in events:
        if isinstance(event, Free):
            if event.key not in allocator.live:
                continue
            allocator.free(event.key)
        elif not allocator.allocate(event):
            continue
        check_blocks(allocator)
        assert capacity is None or allocator.reserved <= capacity


def check_blocks(allocator):
    blocks = [b for pool in allocator.pools.values() for b in pool.blocks.values()] + list(allocator.live.values())
    ordered = sorted(blocks, key=lambda b: b.address)
    for one, other in itertools.pairwise(ordered):
        assert one.address + one.num_bytes <= other.address, "blocks overlap"
    for block in blocks:
        if block.next is not None:
            assert block.next.prev is block
            assert block.address + block.num_bytes == block.next.address
            free = not (block.is_allocated or block.next.is_allocated)
            assert not (free and block.is_mapped == block.next.is_mapped), "neighbours that should have merged"
    assert allocator.reserved == sum(b.num_bytes for b in blocks if b.is_mapped)
    assert allocator.allocated == sum(b.num_bytes for b in allocator.live.values()) <= allocator.reserved
    for pool in allocator.pools.values():
        assert {b.order for b in pool.blocks.values()} == {order for _, order in (*pool.free, *pool.unmapped)}


@given(sequences(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_freeing_everything_leaves_one_block_a_segment(events, expandable):
    allocator = _Allocator(AllocatorSettings(expandable_segments=expandable), None)
    for event in events:
        _ = allocator.free(event.key) if isinstance(event, Free) else allocator.allocate(event)
    for key in list(allocator.live):
        allocator.free(key)
    mapped = [b for pool in allocator.pools.values() for b in pool.cached()]
    assert allocator.allocated == 0
    assert len(mapped) == allocator.num_segments
    assert sum(b.num_bytes for b in mapped) == allocator.reserved
    allocator._release_cached()
    assert allocator.reserved == allocator.num_segments == 0


@given(sequences(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_peaks_are_the_largest_of_what_was(events, expandable):
    setup = AllocatorSettings(expandable_segments=expandable)
    allocator = _Allocator(setup, None)
    seen = [(0, 0, 0)]
    for event in events:
        _ = allocator.free(event.key) if isinstance(event, Free) else allocator.allocate(event)
        seen.append((allocator.requested, allocator.allocated, allocator.reserved))
    usage = simulate(events, setup)
    assert (usage.requested_bytes, usage.allocated_bytes, usage.reserved_bytes) == tuple(
        max(values) for values in zip(*seen, strict=True)
    )
    assert usage.requested_bytes <= usage.allocated_bytes <= usage.reserved_bytes


@given(st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_without_frees_an_expandable_segment_wastes_less_than_a_page_of_each_pool(sizes):
    events = [Allocate(i, size) for i, size in enumerate(sizes)]
    usage = simulate(events, EXPANDABLE)
    assert usage.reserved_bytes - usage.allocated_bytes < 22 * MIB
    assert usage.reserved_bytes < simulate(events).reserved_bytes + 22 * MIB
