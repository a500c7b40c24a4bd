"""The records of a damaged file as a container, so that tensors and donors can be read from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.errors import FormatError
from ckpttool.formats.container import Container, Record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckpttool.formats.limits import ReaderLimits
    from ckpttool.io.reading import FileReader
    from ckpttool.mending.content import Content


class MendedContainer(Container):
    """Records by name, each with the content that it is going to have, or none.

    `add` gives it its records. A record whose content is lost is listed, and cannot be read.
    """

    format = "torch-zip"

    def __init__(self, reader: FileReader, limits: ReaderLimits, byteorder: str) -> None:
        super().__init__(reader, limits)
        self.byteorder = byteorder
        self.has_checksums = True
        self._contents: dict[str, Content] = {}
        self._spans: dict[str, tuple[int, int]] = {}

    def add(
        self, record: Record, content: Content | None, span: tuple[int, int] | None = None
    ) -> None:
        """One more record. `span` is where its content lies in the file, if it lies there as is."""
        self.entries.append(record)
        self.records[record.name] = record
        if content is not None:
            self._contents[record.name] = content
        if span is not None:
            self._spans[record.name] = span

    def span(self, name: str | Record) -> tuple[int, int] | None:
        """See `Container.span`; None also for what is put together from several places."""
        record = self.record(name)
        self._content(record)
        return self._spans.get(record.name)

    def chunks(self, name: str | Record) -> Iterator[memoryview | bytes]:
        """See `Container.chunks`."""
        return iter(self._content(self.record(name)).chunks())

    def _content(self, record: Record) -> Content:
        content = self._contents.get(record.name)
        if content is None:
            raise FormatError(f"record {record.name!r} is lost", record=record.name)
        return content
