"""A slow second allocator for the tests: torch's DeviceCachingAllocator transcribed block by block.

Linked blocks and plain scans as in torch 2.13 c10/cuda/CUDACachingAllocator.cpp, sharing no code and no data
structure with dpofit.memory.caching_allocator. Two liberties, both about addresses only: they ascend, and an
expandable segment keeps its addresses when nothing of it is mapped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 2**20


class OutOfMemory(Exception):
    pass


@dataclass(eq=False)
class Block:
    pool: Pool
    ptr: int
    size: int
    allocated: bool = False
    mapped: bool = True
    prev: Block | None = None
    next: Block | None = None


@dataclass(eq=False)
class Pool:
    stream: str
    is_small: bool
    blocks: list[Block] = field(default_factory=list)  # free and mapped
    unmapped: list[Block] = field(default_factory=list)


def ceil_to(value: int, step: int) -> int:
    return (value + step - 1) // step * step


class ReferenceAllocator:
    def __init__(self, expandable: bool, capacity: int) -> None:
        self.expandable, self.capacity = expandable, capacity
        self.pools: dict[tuple[str, bool], Pool] = {}
        self.live: dict[int, Block] = {}
        self.allocated = self.reserved = self.retries = 0
        self.peak_allocated = self.peak_reserved = 0
        self.next_ptr = ceil_to(2**40, 20 * MIB)

    def malloc(self, storage: int, orig_size: int, stream: str) -> None:
        size = max(512, ceil_to(orig_size, 512))
        pool = self.pools.setdefault((stream, size <= MIB), Pool(stream, size <= MIB))
        block = self.get_free_block(pool, size) or self.alloc_block(pool, size)
        if block is None:
            self.release_cached_blocks()
            self.retries += 1
            block = self.alloc_block(pool, size)
        if block is None:
            raise OutOfMemory
        remaining = block.size - size
        if remaining >= 512 if pool.is_small or self.expandable else remaining > MIB:
            rest = Block(pool, block.ptr + size, remaining)
            self.splice(rest, block, block.next)
            block.size = size
            pool.blocks.append(rest)
        block.allocated = True
        self.live[storage] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, storage: int) -> None:
        block = self.live.pop(storage)
        block.allocated = False
        self.allocated -= block.size
        self.merge_neighbours(block)
        block.pool.blocks.append(block)

    def get_free_block(self, pool: Pool, size: int) -> Block | None:
        ordered = sorted((b for b in pool.blocks if b.size >= size), key=lambda b: (b.size, b.ptr))
        if not ordered:
            return None
        chosen = 0
        if self.expandable:
            while chosen + 1 < len(ordered) and (
                self.expandable_size(ordered[chosen + 1]) < self.expandable_size(ordered[chosen])
            ):
                chosen += 1
        pool.blocks.remove(ordered[chosen])
        return ordered[chosen]

    @staticmethod
    def expandable_size(block: Block) -> int:
        return block.size + (block.next.size if block.next and not block.next.mapped else 0)

    def alloc_block(self, pool: Pool, size: int) -> Block | None:
        if self.expandable:
            return self.try_allocate_expandable_block(pool, size)
        if size <= MIB:
            segment = 2 * MIB
        elif size < 10 * MIB:
            segment = 20 * MIB
        else:
            segment = ceil_to(size, 2 * MIB)
        if self.reserved + segment > self.capacity:
            return None
        self.grow(segment)
        return Block(pool, self.new_addresses(segment), segment)

    def release_cached_blocks(self) -> None:
        for pool in self.pools.values():
            for block in list(pool.blocks):
                if self.expandable:
                    self.unmap_block(block)
                elif block.prev is None and block.next is None:
                    pool.blocks.remove(block)
                    self.reserved -= block.size

    def try_allocate_expandable_block(self, pool: Pool, size: int) -> Block | None:
        block = self.find_expandable_block(pool, size)
        if not block.mapped and not self.map_block(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self.map_block(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.blocks.remove(block)
        return block

    def find_expandable_block(self, pool: Pool, size: int) -> Block:
        for block in sorted(pool.unmapped, key=lambda b: b.ptr):
            start = block.prev if block.prev and not block.prev.allocated else block
            room, at = 0, start
            while at is not None and not at.allocated and room < size:
                room, at = room + at.size, at.next
            if room >= size:
                return start
        space = ceil_to(self.capacity + self.capacity // 8, 20 * MIB)
        candidate = Block(pool, self.new_addresses(space), space, mapped=False)
        pool.unmapped.append(candidate)
        return candidate

    def map_block(self, block: Block, size: int) -> bool:
        mapped = ceil_to(size, 2 * MIB if block.pool.is_small else 20 * MIB)
        if self.reserved + mapped > self.capacity:
            return False
        self.grow(mapped)
        block.pool.unmapped.remove(block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(block.pool, block.ptr + mapped, block.size - mapped, mapped=False)
            self.splice(rest, block, block.next)
            block.pool.unmapped.append(rest)
            block.size = mapped
        self.merge_neighbours(block)
        block.pool.blocks.append(block)
        return True

    def unmap_block(self, block: Block) -> None:
        page = 2 * MIB if block.pool.is_small else 20 * MIB
        first, last = ceil_to(block.ptr, page), (block.ptr + block.size) // page * page
        if first >= last:
            return
        pool, end = block.pool, block.ptr + block.size
        pool.blocks.remove(block)
        if block.ptr < first:
            before = Block(pool, block.ptr, first - block.ptr)
            self.splice(before, block.prev, block)
            pool.blocks.append(before)
        if last < end:
            after = Block(pool, last, end - last)
            self.splice(after, block, block.next)
            pool.blocks.append(after)
        block.ptr, block.size, block.mapped = first, last - first, False
        self.reserved -= block.size
        self.merge_neighbours(block)
        pool.unmapped.append(block)

    def merge_neighbours(self, block: Block) -> None:
        for other in (block.prev, block.next):
            if other is None or other.allocated or other.mapped != block.mapped:
                continue
            (block.pool.blocks if other.mapped else block.pool.unmapped).remove(other)
            block.ptr = min(block.ptr, other.ptr)
            block.size += other.size
            if other is block.prev:
                block.prev = other.prev
                if block.prev:
                    block.prev.next = block
            else:
                block.next = other.next
                if block.next:
                    block.next.prev = block

    @staticmethod
    def splice(block: Block, before: Block | None, after: Block | None) -> None:
        block.prev, block.next = before, after
        if before:
            before.next = block
        if after:
            after.prev = block

    def grow(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def new_addresses(self, size: int) -> int:
        ptr = self.next_ptr
        self.next_ptr = ceil_to(ptr + size + 1, 20 * MIB)
        return ptr
