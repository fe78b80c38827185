"""A slow second implementation of one pool, as lists of neighbours in address order, to hold the fast one against."""

from dataclasses import dataclass, field

from orchestrator.predict.segments import LARGE_SEGMENT_UNITS, PAGE_UNITS, SMALL_UNITS

TEN_MIB = 10 * SMALL_UNITS


@dataclass
class Block:
    size: int
    state: str
    """free, used or unmapped."""


@dataclass
class ReferencePool:
    is_small: bool
    expandable: bool
    segments: list[list[Block]] = field(default_factory=list)

    @property
    def page(self) -> int:
        return PAGE_UNITS if self.is_small else LARGE_SEGMENT_UNITS

    @property
    def reserved(self) -> int:
        return sum(block.size for segment in self.segments for block in segment if block.state != "unmapped")

    @property
    def in_use(self) -> int:
        return sum(block.size for segment in self.segments for block in segment if block.state == "used")

    def allocate(self, size: int, room: float) -> Block | None:
        place = self._cached(size) or (self._mapped(size, room) if self.expandable else self._new(size, room))
        if place is None:
            return None
        segment, block = place
        rest = block.size - size
        if rest >= 1 if self.is_small or self.expandable else rest > SMALL_UNITS:
            segment.insert(_index(segment, block) + 1, Block(rest, "free"))
            block.size = size
        block.state = "used"
        return block

    def free(self, block: Block) -> None:
        block.state = "free"
        self._merge()

    def release(self) -> None:
        if not self.expandable:
            self.segments = [one for one in self.segments if len(one) > 1 or one[0].state != "free"]
            return
        for segment in self.segments:
            parts: list[Block] = []
            position = 0
            for block in segment:
                first = -(-position // self.page) * self.page
                last = (position + block.size) // self.page * self.page
                if block.state == "free" and first < last:
                    sizes = (first - position, last - first, position + block.size - last)
                    states = ("free", "unmapped", "free")
                    parts += [Block(size, state) for size, state in zip(sizes, states, strict=True) if size]
                else:
                    parts.append(block)
                position += block.size
            segment[:] = parts
        self._merge()

    def _cached(self, size: int) -> tuple[list[Block], Block] | None:
        found = [
            (block.size, number, index)
            for number, segment in enumerate(self.segments)
            for index, block in enumerate(segment)
            if block.state == "free" and block.size >= size
        ]
        found.sort()
        if not found:
            return None
        chosen = 0
        if self.expandable:
            while chosen + 1 < len(found) and self._growable(found[chosen + 1]) < self._growable(found[chosen]):
                chosen += 1
        _, number, index = found[chosen]
        return self.segments[number], self.segments[number][index]

    def _growable(self, place: tuple[int, int, int]) -> float:
        size, number, index = place
        following = self.segments[number][index + 1 :]
        if not following:
            return float("inf")
        return size + (following[0].size if following[0].state == "unmapped" else 0)

    def _new(self, size: int, room: float) -> tuple[list[Block], Block] | None:
        if size <= SMALL_UNITS:
            total = PAGE_UNITS
        elif size < TEN_MIB:
            total = LARGE_SEGMENT_UNITS
        else:
            total = -(-size // PAGE_UNITS) * PAGE_UNITS
        if total > room:
            return None
        self.segments.append([Block(total, "free")])
        return self.segments[-1], self.segments[-1][0]

    def _mapped(self, size: int, room: float) -> tuple[list[Block], Block] | None:
        if not self.segments:
            self.segments.append([])
        (segment,) = self.segments
        if segment and segment[-1].state == "unmapped":
            segment.pop()
        segment.append(Block(1 << 60, "unmapped"))
        start = next(
            index for index, block in enumerate(segment) if block.state == "unmapped" and _fits(segment, index, size)
        )
        if start and segment[start - 1].state == "free":
            start -= 1
        wanted, pages, index = size, 0, start
        cuts: list[tuple[Block, int]] = []
        while wanted > 0:
            block = segment[index]
            took = block.size
            if block.state == "unmapped":
                took = min(-(-wanted // self.page) * self.page, block.size)
                cuts.append((block, took))
                pages += took
            wanted -= took
            index += 1
        if pages > room:
            segment.pop()
            return None
        for block, took in cuts:
            block.state = "free"
            if took < block.size:
                segment.insert(_index(segment, block) + 1, Block(block.size - took, "unmapped"))
                block.size = took
        first = segment[start]
        self._merge()
        if segment[-1].state == "unmapped":
            segment.pop()
        return segment, first

    def _merge(self) -> None:
        for segment in self.segments:
            index = 0
            while index + 1 < len(segment):
                here, there = segment[index], segment[index + 1]
                if here.state == there.state != "used":
                    here.size += there.size
                    del segment[index + 1]
                else:
                    index += 1
            if self.expandable and segment and segment[-1].state == "unmapped" and segment[-1].size < 1 << 50:
                segment.pop()


def _index(segment: list[Block], block: Block) -> int:
    return next(index for index, one in enumerate(segment) if one is block)


def _fits(segment: list[Block], index: int, size: int) -> bool:
    if index and segment[index - 1].state == "free":
        index -= 1
    room = 0
    for block in segment[index:]:
        if block.state == "used":
            break
        room += block.size
    return room >= size
