"""The slot of this rank in the launcher's memory: one line of JSON, and one with its CRC-32C.

The launcher reads without a lock, so it may see half of a heartbeat, and tells by the checksum.
"""

import json
import os

SLOT_BYTES = 128 << 10
_POLYNOMIAL = 0x82F63B78


def _table_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(_table_entry(byte) for byte in range(256))


def crc32c(data: bytes) -> int:
    """The checksum. Python has none built in; a heartbeat is so short that this takes some 50 microseconds."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def encode(heartbeat: dict) -> bytes:
    """The contents of a slot. If the collectives do not fit, the newest pending ones are left out."""
    while True:
        text = json.dumps(heartbeat, separators=(",", ":"), allow_nan=False).encode()
        if len(text) + len("\n01234567\n") <= SLOT_BYTES:
            return b"%s\n%08x\n" % (text, crc32c(text))
        pending = heartbeat["pending"]
        heartbeat = {**heartbeat, "pending": pending[:-1]} if pending else {**heartbeat, "completed": []}


class Slot:
    """Writes heartbeats where the launcher reads them."""

    def __init__(self, path: str, offset: int):
        self._offset = offset
        self._file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, heartbeat: dict) -> None:
        """Replaces the heartbeat."""
        os.pwrite(self._file, encode(heartbeat), self._offset)

    def clear(self) -> None:
        """Withdraws the heartbeat. One that is only left to age looks like a process that does not run."""
        os.pwrite(self._file, b"\n", self._offset)
