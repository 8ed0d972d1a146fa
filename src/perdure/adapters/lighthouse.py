"""The gRPC end of torchft's lighthouse protocol; who is answered what is decided elsewhere.

torchft's managers make two calls, `Quorum`, which stays open until there is one, and `Heartbeat`.
Both come here as bytes and are answered with bytes (`perdure.model.bus.lighthouse`), so that no
generated code is needed and newer fields pass through. The one call in the other direction is
`Kill`, by which torchft's own lighthouse ends a replica as well.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from perdure.model.bus.lighthouse import KILL, SERVICE, encode_kill
from perdure.model.errors import PlatformError, ProtocolError, SafetyError

_GRACE_S = 0.2
_KILL_S = 3.0
"""Given to a manager to end its process."""
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 1 << 16),  # A request has some 200 bytes, and is kept.
)


async def kill_replica(manager: str, reason: str) -> str:
    """Have the process end that the manager at this URL runs in; return why it has not, or nothing.

    It ends with exit code 1 and without an answer, so a connection that breaks, or cannot be made,
    says that it has.
    """
    async with grpc.aio.insecure_channel(
        manager.rpartition("//")[2],
        options=(("grpc.enable_http_proxy", 0),),  # It is a node of the job, behind no proxy.
    ) as channel:
        call = channel.unary_unary(KILL)
        try:
            await call(encode_kill(reason), timeout=_KILL_S)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                return ""
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"its manager has not answered for {_KILL_S:g} s"
            return f"its manager refuses: {error.details()}"
    return ""


class LighthouseServer:
    """Serves the two calls on one port."""

    def __init__(
        self,
        quorum: Callable[[bytes], Awaitable[bytes]],
        heartbeat: Callable[[bytes], None],
    ) -> None:
        """Answer calls by these; the one for a quorum is cancelled when the caller hangs up.

        Its `SafetyError` is handed to the caller: no quorum is to be had.
        """
        self._quorum, self._heartbeat = quorum, heartbeat
        self._server = grpc.aio.server(options=_OPTIONS)
        handlers = {
            "Quorum": grpc.unary_unary_rpc_method_handler(self._serve_quorum),
            "Heartbeat": grpc.unary_unary_rpc_method_handler(self._serve_heartbeat),
        }
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic,))

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port, which the system chooses for 0.

        Raises:
            PlatformError: it is taken.
        """
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._server.add_insecure_port(place)
        except RuntimeError as error:
            raise PlatformError(f"the lighthouse cannot listen on {place}") from error
        await self._server.start()
        return int(bound)

    async def close(self) -> None:
        """Hang up."""
        await self._server.stop(_GRACE_S)

    async def _serve_quorum(self, request: bytes, context: Any) -> bytes:
        try:
            return await self._quorum(request)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except SafetyError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return b""

    async def _serve_heartbeat(self, request: bytes, context: Any) -> bytes:
        try:
            self._heartbeat(request)
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return b""
