"""One pool of PyTorch's CUDA caching allocator: how blocks are found, split, joined and given back.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` (functions named below) and `c10/core/AllocatorConfig.h` of
torch 2.13, with the default settings: no `max_split_size`, no garbage collection, one stream. torch 2.4.1 comes to the
same figures, and sources from before `max_split_size` have the same rules. `expandable_segments` came with torch 2.1.

Sizes and addresses are whole units of 512 bytes. Segments never touch each other, so that blocks are joined only
inside of one. Their addresses rise in the order of birth; a driver may give others, which only decides between free
blocks of one size.
"""

from bisect import bisect_left, insort

UNIT_BYTES = 512
"""`kMinBlockSize`: every request is a multiple of it (`round_size`)."""
SMALL_UNITS = (1 << 20) // UNIT_BYTES
"""`kSmallSize`: larger requests live in the large pool (`get_pool`)."""
PAGE_UNITS = (2 << 20) // UNIT_BYTES
"""`kSmallBuffer` and `kRoundLarge`: a small segment, and what large segments are rounded up to."""
LARGE_SEGMENT_UNITS = (20 << 20) // UNIT_BYTES
"""`large_segment_size`: the segment that requests under 10 MiB share, and a large pool's page when expandable."""
_UNSHARED_UNITS = (10 << 20) // UNIT_BYTES

_ADDRESS_BITS = 40
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1


class FreeBlocks:
    """Free blocks, found by size and then address, and by either end."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        """`size << 40 | start`, ascending: the order in which `get_free_block` looks."""
        self.size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}

    def add(self, start: int, size: int) -> None:
        """Add a block, joined with the free blocks that touch it (`try_merge_blocks`)."""
        end = start + size
        before = self._start_of_end.pop(start, None)
        if before is not None:
            joined = self.size_at.pop(before)
            self._drop(before, joined)
            start, size = before, size + joined
        after = self.size_at.pop(end, None)
        if after is not None:
            self._drop(end, after)
            size += after
            end += after
        insort(self.keys, size << _ADDRESS_BITS | start)
        self.size_at[start] = size
        self._start_of_end[end] = start

    def take(self, index: int) -> tuple[int, int]:
        """Remove the block that is `index`-th by size. Returns its (start, size)."""
        key = self.keys.pop(index)
        start, size = key & _ADDRESS_MASK, key >> _ADDRESS_BITS
        del self.size_at[start]
        del self._start_of_end[start + size]
        return start, size

    def best(self, size: int) -> int:
        """Index of the smallest block of at least `size`; the number of blocks when there is none."""
        return bisect_left(self.keys, size << _ADDRESS_BITS)

    def block(self, index: int) -> tuple[int, int]:
        """(start, size) of the block that is `index`-th by size."""
        return self.keys[index] & _ADDRESS_MASK, self.keys[index] >> _ADDRESS_BITS

    def index_of(self, start: int) -> int:
        """Which block by size begins at `start`."""
        return bisect_left(self.keys, self.size_at[start] << _ADDRESS_BITS | start)

    def starting_before(self, end: int) -> int:
        """Where the free block begins that ends at `end`; `end` when there is none."""
        return self._start_of_end.get(end, end)

    def clear(self) -> list[tuple[int, int]]:
        """Remove all blocks. Returns their (start, size) by size."""
        blocks = [self.block(index) for index in range(len(self.keys))]
        self.keys.clear()
        self.size_at.clear()
        self._start_of_end.clear()
        return blocks

    def _drop(self, start: int, size: int) -> None:
        del self.keys[bisect_left(self.keys, size << _ADDRESS_BITS | start)]


class FixedSegments:
    """A pool whose segments keep their size: the default."""

    def __init__(self, *, is_small: bool) -> None:
        self.reserved = 0
        self.in_use = 0
        self._least_rest = 1 if is_small else SMALL_UNITS + 1
        self._free = FreeBlocks()
        self._used: dict[int, int] = {}
        self._segments: dict[int, int] = {}
        self._next_start = 0

    @property
    def segments(self) -> int:
        """How many segments are held."""
        return len(self._segments)

    def allocate(self, size: int, room: float) -> int | None:
        """The start of a block for `size`; None when that takes a segment of more than `room` (`alloc_block`)."""
        free = self._free
        index = free.best(size)
        if index < len(free.keys):
            start, found = free.take(index)
        else:
            found = _segment_units(size)
            if found > room:
                return None
            start = self._next_start
            self._next_start += found + 1
            self._segments[start] = found
            self.reserved += found
        if found - size >= self._least_rest:
            free.add(start + size, found - size)
            found = size
        self._used[start] = found
        self.in_use += found
        return start

    def free(self, start: int) -> None:
        """Give the block at `start` back to the pool (`free_block`)."""
        size = self._used.pop(start)
        self.in_use -= size
        self._free.add(start, size)

    def release(self) -> int:
        """Give segments that are wholly free back to the device (`release_blocks`). Returns how many."""
        released = 0
        for start, size in self._free.clear():
            if self._segments.get(start) == size:
                del self._segments[start]
                self.reserved -= size
                released += 1
            else:
                self._free.add(start, size)
        return released


class ExpandableSegments:
    """A pool with one segment that grows and shrinks by pages: `expandable_segments:True`."""

    def __init__(self, *, is_small: bool) -> None:
        self.reserved = 0
        self.in_use = 0
        self._page = PAGE_UNITS if is_small else LARGE_SEGMENT_UNITS
        self._free = FreeBlocks()
        self._used: dict[int, int] = {}
        self._holes: dict[int, int] = {}
        """Start and size of the unmapped ranges below `_end`."""
        self._end = 0
        """Above it nothing is mapped."""

    @property
    def segments(self) -> int:
        """How many pages are held."""
        return self.reserved // self._page

    def allocate(self, size: int, room: float) -> int | None:
        """The start of a block for `size`; None when that takes more than `room` of new pages."""
        index = self._best_expandable(size)
        if index < len(self._free.keys):
            start, found = self._free.take(index)
        else:
            grown = self._grow(size, room)
            if grown is None:
                return None
            start, found = grown
        if found > size:
            self._free.add(start + size, found - size)
        self._used[start] = size
        self.in_use += size
        return start

    def free(self, start: int) -> None:
        """Give the block at `start` back to the pool."""
        size = self._used.pop(start)
        self.in_use -= size
        self._free.add(start, size)

    def release(self) -> int:
        """Unmap the pages that are wholly free (`unmap_block`). Returns how many."""
        unmapped = 0
        for start, size in self._free.clear():
            first = -(-start // self._page) * self._page
            last = (start + size) // self._page * self._page
            if first >= last:
                self._free.add(start, size)
                continue
            self._holes[first] = last - first
            unmapped += last - first
            for rest, end in ((start, first), (last, start + size)):
                if end > rest:
                    self._free.add(rest, end - rest)
        self.reserved -= unmapped
        self._join_holes()
        return unmapped // self._page

    def _best_expandable(self, size: int) -> int:
        """`get_free_block`: a block before an unmapped range counts as large as it could grow to."""
        index = self._free.best(size)
        while index + 1 < len(self._free.keys) and self._growable(index + 1) < self._growable(index):
            index += 1
        return index

    def _growable(self, index: int) -> float:
        start, size = self._free.block(index)
        end = start + size
        return float("inf") if end == self._end else size + self._holes.get(end, 0)

    def _grow(self, size: int, room: float) -> tuple[int, int] | None:
        """Map pages at the lowest address where `size` fits (`find_expandable_block`, `map_block`).

        Returns the free block's (start, size), which is taken out of the free blocks. Holes that were filled before
        there was no more room stay filled.
        """
        for hole in (*sorted(self._holes), self._end):
            start = self._free.starting_before(hole)
            if self._room_from(start) >= size:
                break
        pages: list[tuple[int, int]] = []
        position = start
        while position < start + size:
            if position in self._free.size_at:
                position += self._free.size_at[position]
                continue
            wanted = -(-(start + size - position) // self._page) * self._page
            mapped = min(wanted, self._holes.get(position, wanted))
            pages.append((position, mapped))
            position += mapped
        for page, mapped in pages:
            if mapped > room:
                return None
            room -= mapped
            self._map(page, mapped)
        return self._free.take(self._free.index_of(start))

    def _room_from(self, position: int) -> float:
        start = position
        while position < self._end:
            step = self._free.size_at.get(position) or self._holes.get(position)
            if step is None:
                return position - start
            position += step
        return float("inf")

    def _map(self, start: int, size: int) -> None:
        hole = self._holes.pop(start, None)
        if hole is not None and hole > size:
            self._holes[start + size] = hole - size
        self._end = max(self._end, start + size)
        self.reserved += size
        self._free.add(start, size)

    def _join_holes(self) -> None:
        joined: list[list[int]] = []
        for start in sorted(self._holes):
            end = start + self._holes[start]
            if joined and joined[-1][1] == start:
                joined[-1][1] = end
            else:
                joined.append([start, end])
        if joined and joined[-1][1] == self._end:
            self._end = joined.pop()[0]
        self._holes = {start: end - start for start, end in joined}


def _segment_units(size: int) -> int:
    """`get_allocation_size`: how large a segment is asked of the device for a request of `size`."""
    if size <= SMALL_UNITS:
        return PAGE_UNITS
    if size < _UNSHARED_UNITS:
        return LARGE_SEGMENT_UNITS
    return -(-size // PAGE_UNITS) * PAGE_UNITS
