"""Settings of the CUDA caching allocator: read as torch reads them, and written back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoremat import UsageError
from autoremat._allocator_settings import DEFAULT_SETTINGS, AllocatorSettings

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_sise_mb:64", "max_split_sise_mb.*not known.*max_split_size_mb"),
        ("max_split_size_mb:19", "at least 20"),
        ("max_split_size_mb:64.5", "whole number"),
        ("expandable_segments:true", "True or False"),
        ("expandable_segments", "key:value"),
        ("garbage_collection_threshold:1.5", "above 0"),
        ("garbage_collection_threshold:x", "above 0"),
        ("garbage_collection_threshold:1", "above 0"),
        ("per_process_memory_fraction:0", "above 0"),
        ("roundup_power2_divisions:3", "power of two"),
        ("roundup_power2_divisions:[100:4]", "power of two"),
        ("backend:cudaMallocAsync", "cudaMallocAsync"),
    ],
)
def test_settings_that_torch_would_refuse_are_refused_by_name(text, message):
    with pytest.raises(UsageError, match=message):
        AllocatorSettings.parse(text)


def test_settings_that_change_no_device_block_are_accepted():
    text = "pinned_use_background_threads:True, release_lock_on_cudamalloc:True,backend:native"
    assert AllocatorSettings.parse(text) == AllocatorSettings.parse("") == AllocatorSettings()
    assert AllocatorSettings.parse("large_segment_size_mb:32").segment_bytes(2 * MIB) == 32 * MIB
    assert AllocatorSettings.parse("max_split_size_mb:20").max_split_bytes == 20 * MIB


@given(
    st.booleans(),
    st.sampled_from([None, 20 * MIB, 640 * MIB]),
    st.sampled_from([None, 11, 32]),
    st.lists(st.sampled_from([0, 1, 2, 8]), min_size=16, max_size=16),
    st.sampled_from([0.0, 0.25]),
)
def test_settings_are_written_as_they_are_read(expandable, most, large, divisions, threshold):
    large = (large or 20) * MIB
    setup = AllocatorSettings(
        expandable_segments=expandable,
        max_split_bytes=most and max(most, large),
        large_segment_bytes=large,
        max_non_split_rounding_bytes=large if most is None else large + MIB,
        roundup_power2_divisions=tuple(divisions),
        garbage_collection_threshold=threshold,
        memory_fraction=1 - threshold,
    )
    assert AllocatorSettings.parse(setup.to_text()) == setup
    assert DEFAULT_SETTINGS.to_text() == ""
