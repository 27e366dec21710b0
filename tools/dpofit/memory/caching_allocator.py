"""PyTorch's CUDA caching allocator: which requests share segments, split, merge, grow and give back.

Models torch 2.13 c10/cuda/CUDACachingAllocator.cpp with c10/core/AllocatorConfig.h's defaults; function names
in comments are of the former. Not modelled: garbage_collection_threshold, max_split_size_mb,
roundup_power2_divisions, private pools of CUDA graphs, record_stream (a free is reusable at once), and the
order in which the driver hands out addresses (here ascending; it only breaks ties between equal blocks).

Addresses and sizes are in units of 512 bytes, torch's kMinBlockSize. A free block is one integer,
`size << _ADDRESS_BITS | address`, so that a sorted list of them is ordered by size and then address, as
BlockComparatorSize orders a pool's set; neighbours are found by address in two dictionaries.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator

_UNIT_BITS = 9  # kMinBlockSize = 512
_ADDRESS_BITS = 128  # far past any card: a mistyped length asks for sizes no GPU has, and must still be counted
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1
_SMALL = 1 << 20 >> _UNIT_BITS  # kSmallSize: larger requests go to the large pool
_SMALL_BUFFER = 2 << 20 >> _UNIT_BITS  # kSmallBuffer: segment, or expandable page, of the small pool
_LARGE_BUFFER = 20 << 20 >> _UNIT_BITS  # large_segment_size: segment of requests below 10 MiB, expandable page
_MIN_LARGE_ALLOC = 10 << 20 >> _UNIT_BITS  # kMinLargeAlloc
_ROUND_LARGE = 2 << 20 >> _UNIT_BITS  # kRoundLarge
_UNBOUNDED_SPACE = _LARGE_BUFFER << 18  # 5 TiB of addresses per expandable segment when no capacity is given


class _Pool:
    """The free blocks of one stream's small or large pool."""

    __slots__ = ("keys", "page", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.page = _SMALL_BUFFER if small else _LARGE_BUFFER
        self.keys: list[int] = []  # size << _ADDRESS_BITS | address, sorted
        self.unmapped: list[int] = []  # addresses of unmapped blocks of expandable segments, sorted


class CachingAllocator:
    """One GPU's allocator: `malloc` and `free` by storage id; sizes in bytes at the edge, 512-byte units inside."""

    def __init__(self, *, expandable: bool, capacity_bytes: int | None = None) -> None:
        self._expandable = expandable
        self._capacity = None if capacity_bytes is None else capacity_bytes >> _UNIT_BITS
        self._small: dict[str, _Pool] = {}
        self._large: dict[str, _Pool] = {}
        self._live: dict[Hashable, tuple[_Pool, int, int]] = {}  # storage → pool, address, size
        self._free_at: dict[int, int] = {}  # address of a free block → its size
        self._free_end: dict[int, int] = {}  # address where a free block ends → its address
        self._unmapped_at: dict[int, int] = {}  # address of an unmapped block → its size
        self._segment_at: dict[int, int] = {}  # address of a cudaMalloc'd segment → its size
        self._next_address = _LARGE_BUFFER
        self._allocated = self._reserved = self._pages = 0
        self._peak_allocated = self._peak_reserved = 0
        self.retries = 0  # num_alloc_retries

    def malloc(self, storage: Hashable, size_bytes: int, stream: str) -> bool:
        """Allocate; False if neither cached nor new memory suffices. DeviceCachingAllocator::malloc."""
        assert storage not in self._live, f"{storage} is alive already"
        size = (size_bytes + 511) >> _UNIT_BITS
        pools = self._small if size <= _SMALL else self._large
        pool = pools.get(stream)
        if pool is None:
            pool = pools[stream] = _Pool(size <= _SMALL)

        keys = pool.keys
        index = bisect_left(keys, size << _ADDRESS_BITS)
        if index < len(keys):
            key = keys[index]
            address, block = key & _ADDRESS_MASK, key >> _ADDRESS_BITS
            if address + block in self._unmapped_at:
                index = self._away_from_the_edge(keys, index)
                key = keys[index]
                address, block = key & _ADDRESS_MASK, key >> _ADDRESS_BITS
            del keys[index], self._free_at[address]
        else:
            found = self._grow(pool, size)
            if found is None:
                return False
            address, block = found

        remaining = block - size
        # should_split: the large pool keeps up to 1 MiB with the block, except in expandable segments
        if remaining > (0 if pool.small or self._expandable else _SMALL):
            self._free_at[address + size] = remaining
            self._free_end[address + block] = address + size
            insort(keys, remaining << _ADDRESS_BITS | address + size)
        else:
            size = block
            del self._free_end[address + block]
        self._live[storage] = pool, address, size
        self._allocated += size
        if self._allocated > self._peak_allocated:
            self._peak_allocated = self._allocated
        return True

    def free(self, storage: Hashable) -> None:
        """Give a block back to its pool. free_block."""
        block = self._live.pop(storage, None)
        assert block is not None, f"{storage} is not alive"
        pool, address, size = block
        self._allocated -= size
        self._insert_free(pool, address, size)

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache(): everything wholly unused goes back to the driver."""
        self._release_cached()

    def reset_peaks(self) -> None:
        """Peaks count from here, as torch.cuda.reset_peak_memory_stats."""
        self._peak_allocated, self._peak_reserved = self._allocated, self._reserved

    @property
    def allocated_bytes(self) -> int:
        return self._allocated << _UNIT_BITS

    @property
    def reserved_bytes(self) -> int:
        return self._reserved << _UNIT_BITS

    @property
    def peak_allocated_bytes(self) -> int:
        return self._peak_allocated << _UNIT_BITS

    @property
    def peak_reserved_bytes(self) -> int:
        return self._peak_reserved << _UNIT_BITS

    @property
    def segments(self) -> int:
        """cudaMalloc'd segments, or mapped pages of expandable ones."""
        return len(self._segment_at) + self._pages

    def blocks(self) -> Iterator[tuple[Hashable, int, int]]:
        """Every live storage with its address and size in bytes."""
        for storage, (_, address, size) in self._live.items():
            yield storage, address << _UNIT_BITS, size << _UNIT_BITS

    def _insert_free(self, pool: _Pool, address: int, size: int) -> None:
        """Put a mapped block into its pool, merged with free neighbours. try_merge_blocks."""
        free_at, free_end, keys = self._free_at, self._free_end, pool.keys
        end = address + size
        before = free_end.pop(address, None)
        if before is not None:
            del keys[bisect_left(keys, address - before << _ADDRESS_BITS | before)]
            address = before
        after = free_at.pop(end, None)
        if after is not None:
            del keys[bisect_left(keys, after << _ADDRESS_BITS | end)]
            end += after
        size = end - address
        free_at[address] = size
        free_end[end] = address
        insort(keys, size << _ADDRESS_BITS | address)

    def _grow(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """Address and size of a new block, taken out of the pool; released memory is tried once. alloc_block."""
        grow = self._map_expandable if self._expandable else self._new_segment
        found = grow(pool, size)
        if found is None:
            self._release_cached()
            self.retries += 1
            found = grow(pool, size)
        return found

    def _reserve(self, size: int) -> bool:
        """Count `size` as reserved, unless that is more than there is."""
        if self._capacity is not None and self._reserved + size > self._capacity:
            return False
        self._reserved += size
        if self._reserved > self._peak_reserved:
            self._peak_reserved = self._reserved
        return True

    def _new_segment(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """cudaMalloc of get_allocation_size(size)."""
        if size <= _SMALL:
            segment = _SMALL_BUFFER
        elif size < _MIN_LARGE_ALLOC:
            segment = _LARGE_BUFFER
        else:
            segment = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        if not self._reserve(segment):
            return None
        address = self._next_address
        self._next_address += segment + 1  # the gap keeps blocks of two segments from being neighbours
        self._segment_at[address] = segment
        self._free_end[address + segment] = address
        return address, segment

    def _release_cached(self) -> None:
        """Give back wholly free segments, and wholly free pages of expandable ones. release_cached_blocks."""
        for pool in (*self._large.values(), *self._small.values()):
            for key in list(pool.keys):
                address, size = key & _ADDRESS_MASK, key >> _ADDRESS_BITS
                if self._expandable:
                    self._unmap(pool, address, size)
                elif self._segment_at.get(address) == size:
                    del self._segment_at[address], self._free_at[address], self._free_end[address + size]
                    del pool.keys[bisect_left(pool.keys, key)]
                    self._reserved -= size

    # Expandable segments: one long range of addresses per pool, pages mapped as needed.

    def _away_from_the_edge(self, keys: list[int], index: int) -> int:
        """Best fit counts a block before unmapped addresses as large as it could grow. get_free_block."""
        unmapped_at = self._unmapped_at

        def expandable_size(key: int) -> int:
            size = key >> _ADDRESS_BITS
            return size + unmapped_at.get((key & _ADDRESS_MASK) + size, 0)

        current = expandable_size(keys[index])
        while index + 1 < len(keys):
            following = expandable_size(keys[index + 1])
            if following >= current:
                break
            index, current = index + 1, following
        return index

    def _map_expandable(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """Map pages until a free block of `size` exists. try_allocate_expandable_block."""
        address = self._expandable_candidate(pool, size)
        unmapped = self._unmapped_at.get(address)
        if unmapped is not None and not self._map(pool, address, min(unmapped, size)):
            return None
        while (block := self._free_at[address]) < size:
            edge = address + block
            if not self._map(pool, edge, min(size - block, self._unmapped_at[edge])):
                return None  # what was mapped so far stays cached
        del pool.keys[bisect_left(pool.keys, block << _ADDRESS_BITS | address)]
        del self._free_at[address]
        return address, block

    def _expandable_candidate(self, pool: _Pool, size: int) -> int:
        """The lowest run of free and unmapped addresses with room for `size`. find_expandable_block."""
        for unmapped in pool.unmapped:
            start = self._free_end.get(unmapped, unmapped)
            edge = start
            while edge - start < size:
                step = self._free_at.get(edge) or self._unmapped_at.get(edge)
                if step is None:
                    break
                edge += step
            if edge - start >= size:
                return start
        # Address space for 1 1/8 of the card's memory, so that pages can move to the end under pressure.
        # Never less than what is asked for: a card with no room at all is out of memory like any other.
        space = max(_UNBOUNDED_SPACE if self._capacity is None else self._capacity + self._capacity // 8, size)
        space = -(-space // _LARGE_BUFFER) * _LARGE_BUFFER
        start = self._next_address
        self._next_address += space + _LARGE_BUFFER  # a gap, and page alignment
        self._insert_unmapped(pool, start, space)
        return start

    def _map(self, pool: _Pool, address: int, size: int) -> bool:
        """Map the pages that hold `size` from the start of the unmapped block at `address`. map_block."""
        mapped = -(-size // pool.page) * pool.page
        if not self._reserve(mapped):
            return False
        unmapped = self._unmapped_at.pop(address)
        index = bisect_left(pool.unmapped, address)
        if mapped < unmapped:
            pool.unmapped[index] = address + mapped
            self._unmapped_at[address + mapped] = unmapped - mapped
        else:
            del pool.unmapped[index]
        self._pages += mapped // pool.page
        self._insert_free(pool, address, mapped)
        return True

    def _unmap(self, pool: _Pool, address: int, size: int) -> None:
        """Unmap the pages that lie wholly inside a free block. unmap_block."""
        page, end = pool.page, address + size
        first, last = -(-address // page) * page, end // page * page
        if first >= last:
            return
        del pool.keys[bisect_left(pool.keys, size << _ADDRESS_BITS | address)]
        del self._free_at[address], self._free_end[end]
        if address < first:
            self._insert_free(pool, address, first - address)
        if last < end:
            self._insert_free(pool, last, end - last)
        self._reserved -= last - first
        self._pages -= (last - first) // page
        self._insert_unmapped(pool, first, last - first)

    def _insert_unmapped(self, pool: _Pool, address: int, size: int) -> None:
        """Add an unmapped block, merged with unmapped neighbours."""
        after = self._unmapped_at.pop(address + size, None)
        if after is not None:
            pool.unmapped.remove(address + size)
            size += after
        index = bisect_left(pool.unmapped, address)
        if index:
            before = pool.unmapped[index - 1]
            if before + self._unmapped_at[before] == address:
                self._unmapped_at[before] += size
                return
        pool.unmapped.insert(index, address)
        self._unmapped_at[address] = size
