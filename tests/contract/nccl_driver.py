"""NCCL as the plugin meets it: the interface by ctypes, each version written out on its own."""

import ctypes as c
from typing import Any

V3, V4, V5, V6 = 3, 4, 5, 6
COLL, P2P, PROXY_OP, PROXY_STEP, KERNEL_CH, NET = 2, 4, 8, 16, 64, 128
GROUP_API, COLL_API, CE_COLL, CE_SYNC = 256, 512, 4096, 8192
SEND_GPU, SEND_NET, RECV_NET, RECV_FLUSH, RECV_GPU = 8, 9, 10, 11, 12
IN_PROGRESS, SEND_PEER, NET_UPDATE, KERNEL_STOP = 19, 20, 21, 22


def fields(**types: Any) -> list[tuple[str, Any]]:
    return list(types.items())


class CollV3(c.Structure):
    _fields_ = fields(
        name=c.c_char_p, comm_hash=c.c_uint64, seq=c.c_uint64, func=c.c_char_p,
        send=c.c_void_p, recv=c.c_void_p, count=c.c_size_t, root=c.c_int, datatype=c.c_char_p,
        channels=c.c_uint8, warps=c.c_uint8, algo=c.c_char_p, proto=c.c_char_p,
    )  # fmt: skip


class P2pV3(c.Structure):
    _fields_ = fields(
        name=c.c_char_p, comm_hash=c.c_uint64, func=c.c_char_p, buffer=c.c_void_p,
        datatype=c.c_char_p, count=c.c_size_t, peer=c.c_int,
    )  # fmt: skip


class CollV5(c.Structure):
    _fields_ = fields(
        seq=c.c_uint64, func=c.c_char_p, send=c.c_void_p, recv=c.c_void_p, count=c.c_size_t,
        root=c.c_int, datatype=c.c_char_p, channels=c.c_uint8, warps=c.c_uint8, algo=c.c_char_p,
        proto=c.c_char_p, parent_group=c.c_void_p,
    )  # fmt: skip


class P2pV5(c.Structure):
    _fields_ = fields(
        func=c.c_char_p, buffer=c.c_void_p, datatype=c.c_char_p, count=c.c_size_t, peer=c.c_int,
        channels=c.c_uint8, parent_group=c.c_void_p,
    )  # fmt: skip


class ProxyOp(c.Structure):
    _fields_ = fields(
        pid=c.c_int, channel=c.c_uint8, peer=c.c_int, n_steps=c.c_int, chunk=c.c_int,
        is_send=c.c_int,
    )  # fmt: skip


class Kernel(c.Structure):
    _fields_ = fields(channel=c.c_uint8, gpu_ns=c.c_uint64)


class Net(c.Structure):
    _fields_ = fields(id=c.c_int64, data=c.c_void_p)


class CeColl(c.Structure):
    _fields_ = fields(
        seq=c.c_uint64, func=c.c_char_p, send=c.c_void_p, recv=c.c_void_p, count=c.c_size_t,
        root=c.c_int, datatype=c.c_char_p, sync=c.c_char_p, intra=c.c_bool, batch=c.c_uint32,
        batches=c.c_uint32, ce_seq=c.c_uint32, stream=c.c_void_p,
    )  # fmt: skip


def _descriptor(type_: Any, **kinds: Any) -> Any:
    kinds |= {"proxy_op": ProxyOp, "step": c.c_int, "net": Net}
    union = type("Union", (c.Union,), {"_fields_": list(kinds.items())})
    body = [("type", type_), ("parent", c.c_void_p), ("rank", c.c_int), ("u", union)]
    return type("Descriptor", (c.Structure,), {"_fields_": body})


DESCRIPTORS = {
    V3: _descriptor(c.c_uint8, coll=CollV3, p2p=P2pV3, kernel=c.c_uint8),
    V4: _descriptor(c.c_uint8, coll=CollV5, p2p=P2pV5, kernel=Kernel),
    V5: _descriptor(c.c_uint64, coll=CollV5, p2p=P2pV5, kernel=Kernel),
    V6: _descriptor(c.c_uint64, coll=CollV5, p2p=P2pV5, kernel=Kernel, ce=CeColl),
}

_PTR = c.POINTER(c.c_void_p)
_COMM = (c.c_int, c.c_int, c.c_int, c.c_void_p)
INITS = {
    V3: (_PTR, c.POINTER(c.c_int)),
    V4: (_PTR, c.POINTER(c.c_int), c.c_char_p, c.c_uint64, *_COMM),
    V5: (_PTR, c.c_uint64, c.POINTER(c.c_int), c.c_char_p, *_COMM),
    V6: (_PTR, c.c_uint64, c.POINTER(c.c_int), c.c_char_p, *_COMM),
}


class Args(c.Union):
    """What recordEventState is given."""

    _fields_ = fields(bytes=c.c_size_t, gpu_ns=c.c_uint64, data=c.c_void_p)


class Nccl:
    """One version of the interface of one loaded plugin, with one communicator open."""

    def __init__(
        self, library: str, version: int, name: bytes = b"tp", rank: int = 1, ranks: int = 4
    ) -> None:
        functions = [
            ("name", c.c_char_p),
            ("init", c.CFUNCTYPE(c.c_int, *INITS[version])),
            ("start", c.CFUNCTYPE(c.c_int, c.c_void_p, _PTR, c.c_void_p)),
            ("stop", c.CFUNCTYPE(c.c_int, c.c_void_p)),
            ("record", c.CFUNCTYPE(c.c_int, c.c_void_p, c.c_int, c.c_void_p)),
            ("finalize", c.CFUNCTYPE(c.c_int, c.c_void_p)),
        ]
        table: Any = type("Table", (c.Structure,), {"_fields_": functions})
        self.version = version
        self.library = c.CDLL(library)
        self.table = table.in_dll(self.library, f"ncclProfiler_v{version}")
        self.init(name, rank, ranks)

    def init(self, name: bytes, rank: int, ranks: int) -> None:
        """Open a communicator, which is the one from now on."""
        self.context, self.mask = c.c_void_p(), c.c_int(-1)
        context, mask = c.byref(self.context), c.byref(self.mask)
        world = (2, ranks, rank, None)
        done = {
            V3: lambda: self.table.init(context, mask),
            V4: lambda: self.table.init(context, mask, name, 0xABC, *world),
            V5: lambda: self.table.init(context, 0xABC, mask, name, *world),
            V6: lambda: self.table.init(context, 0xABC, mask, name, *world),
        }[self.version]()
        assert done == 0

    def start(self, type_: int, parent: Any = None, **body: Any) -> c.c_void_p:
        descriptor = DESCRIPTORS[self.version]()
        c.memset(c.byref(descriptor), 0xEE, c.sizeof(descriptor))  # Rubbish wherever NCCL leaves it
        descriptor.type, descriptor.parent, descriptor.rank = type_, parent, 1
        for name, value in body.items():
            setattr(descriptor.u, name, value)
        handle = c.c_void_p(0xDEAD)
        assert self.table.start(self.context, c.byref(handle), c.byref(descriptor)) == 0
        return handle

    def coll(self, seq: int, count: int = 1000) -> c.c_void_p:
        common = {"seq": seq, "func": b"AllReduce", "count": count, "root": 0, "channels": 2}
        common |= {"datatype": b"ncclBfloat16", "algo": b"RING", "proto": b"SIMPLE"}
        if self.version == V3:
            return self.start(COLL, coll=CollV3(name=b"tp", comm_hash=0xABC, **common))
        return self.start(COLL, coll=CollV5(**common))

    def p2p(self, peer: int) -> c.c_void_p:
        common = {"func": b"Send", "datatype": b"ncclFloat32", "count": 10, "peer": peer}
        if self.version == V3:
            return self.start(P2P, p2p=P2pV3(name=b"tp", comm_hash=0xABC, **common))
        return self.start(P2P, p2p=P2pV5(channels=1, **common))

    def kernel(self, parent: Any, channel: int, gpu_ns: int) -> c.c_void_p:
        if self.version == V3:
            return self.start(KERNEL_CH, parent, kernel=channel)
        return self.start(KERNEL_CH, parent, kernel=Kernel(channel, gpu_ns))

    def record(self, handle: Any, state: int, **args: Any) -> None:
        given = Args(**args)
        assert self.table.record(handle, state, c.byref(given) if args else None) == 0

    def stop(self, handle: Any) -> None:
        assert self.table.stop(handle) == 0

    def finalize(self) -> None:
        assert self.table.finalize(self.context) == 0
