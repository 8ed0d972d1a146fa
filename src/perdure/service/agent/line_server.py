"""Lines of a socket, of whatever length the other side makes them."""

import asyncio

LINE_MAX = 16 << 20
"""Bytes of a line, as the limit of its reader."""


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line, and nothing at the end.

    In the place of one that is longer than the reader's limit stands the reason, which no decoder
    takes for a message; what follows of that line is another one, or several.
    """
    try:
        return await reader.readline()
    except ValueError as error:
        return f"a line is too long: {error}\n".encode()
