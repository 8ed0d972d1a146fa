"""What NCCL is told where several ranks share a GPU.

It refuses that, unless each rank has a host of its own by NCCL_HOSTID: then all goes over sockets.
"""

NCCL_ON_ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0", "NCCL_MAX_NCHANNELS": "2",
}  # fmt: skip
