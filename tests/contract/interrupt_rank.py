"""A rank for `test_interrupt`: an ordinary loop of collectives, beside connections of its own."""

import asyncio
import json
import os
import socket
import struct
import sys
import threading
import time

import torch
import torch.distributed as dist

from perdure.worker.attach import attach_rank


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)


def start_own_server() -> socket.socket:
    """Serve by asyncio (an epoll that watches a listener) and return a client's connection."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    ports: list[int] = []

    async def serve() -> None:
        server = await asyncio.start_server(_echo, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()

    def run() -> None:
        loop.create_task(serve())
        loop.run_forever()

    threading.Thread(target=run, daemon=True).start()
    ready.wait()
    client = socket.create_connection(("127.0.0.1", ports[0]))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    timeout = struct.pack("@ll", 3600, 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        client.setsockopt(socket.SOL_SOCKET, option, timeout)
    return client


def end_with_parent() -> None:
    """A test that is killed leaves no rank behind: its end of the pipe is closed then."""
    sys.stdin.read()
    os._exit(3)


def main() -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    attach_rank()
    torch.set_num_threads(1)
    own = start_own_server()
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    tensor = torch.ones(1000)
    say(ready=dist.get_rank())
    try:
        while True:
            dist.all_reduce(tensor)
            if dist.get_rank() < 2:
                dist.all_reduce(tensor, group=pair)
            time.sleep(0.01)
    except Exception as error:
        raised_s = time.monotonic()
        own.sendall(b"still here")
        echo = own.recv(100).decode()
        store = dist.distributed_c10d._get_default_store()
        store.set(f"after/{dist.get_rank()}", "alive")
        say(
            type=type(error).__name__,
            text=str(error)[:200],
            raised_s=raised_s,
            echo=echo,
            store=store.get(f"after/{dist.get_rank()}").decode(),
        )
    sys.stdin.readline()
    os._exit(0)


main()
