"""The little of the flatbuffers format that the metadata of Arrow files uses."""

import struct

from fmsdata.formats.damage import Truncated


class Table:
    """A flatbuffers table at a position in some bytes."""

    def __init__(self, data: memoryview, position: int) -> None:
        self._data = data
        self._position = position
        (back,) = struct.unpack_from("<i", data, position)
        self._slots = position - back
        if self._slots < 0:  # struct would read from the end of the data
            raise Truncated("its metadata points outside of itself")
        (self._end,) = struct.unpack_from("<H", data, self._slots)

    @classmethod
    def root(cls, data: memoryview, position: int) -> "Table":
        return cls(data, position + struct.unpack_from("<I", data, position)[0])

    def position(self, field: int) -> int:
        """The position of a field's value, or 0 if the field was left out: it has its default."""
        slot = 4 + 2 * field
        if slot >= self._end:
            return 0
        (offset,) = struct.unpack_from("<H", self._data, self._slots + slot)
        return self._position + offset if offset else 0

    def is_before(self, position: int) -> bool:
        """Whether everything that says where the fields are is in front of a position."""
        return self._position + 4 <= position and bool(self._slots + self._end <= position)

    def number(self, field: int, form: str = "<q") -> int:
        position = self.position(field)
        return int(struct.unpack_from(form, self._data, position)[0]) if position else 0

    def table(self, field: int) -> "Table":
        position = self.position(field)
        if not position:
            raise Truncated("its metadata is incomplete")
        return Table.root(self._data, position)

    def vector(self, field: int) -> tuple[int, int]:
        """The position of a vector's first element, and the number of elements."""
        position = self.position(field)
        if not position:
            return 0, 0
        position += struct.unpack_from("<I", self._data, position)[0]
        return position + 4, struct.unpack_from("<I", self._data, position)[0]
