"""What the tests of formats share: opening bytes as a file, and listing what was noticed."""

from __future__ import annotations

from pathlib import Path

from ckpttool.errors import FormatError
from ckpttool.formats.anomaly import Anomaly
from ckpttool.formats.container import Container
from ckpttool.formats.limits import DEFAULT_LIMITS, ReaderLimits
from ckpttool.formats.torch_zip import ZipContainer, open_zip
from ckpttool.io.reading import FileReader


class Opened:
    """A zip made of bytes, opened. Close it, or use it as a context manager."""

    def __init__(self, path: Path, data: bytes, limits: ReaderLimits = DEFAULT_LIMITS) -> None:
        path.write_bytes(data)
        self.reader = FileReader(path)
        self.container: ZipContainer = open_zip(self.reader, limits)

    def __enter__(self) -> ZipContainer:
        return self.container

    def __exit__(self, *_: object) -> None:
        self.reader.close()


def codes(anomalies: list[Anomaly]) -> set[str]:
    """The codes of some anomalies."""
    return {anomaly.code for anomaly in anomalies}


def one(anomalies: list[Anomaly], code: str) -> Anomaly:
    """The only anomaly with this code."""
    (found,) = [anomaly for anomaly in anomalies if anomaly.code == code]
    return found


def everything(container: Container) -> list[Anomaly]:
    """What was noticed while opening and in the slow look at the structure."""
    return [*container.anomalies, *container.check_structure()]


def bad_records(container: Container) -> list[str]:
    """Names of the records whose content isn't what its checksum says, or can't be read."""
    bad = []
    for record in container.entries:
        try:
            if record.crc is None or container.crc32(record) != record.crc:
                bad.append(record.name)
        except FormatError:
            bad.append(record.name)
    return bad
