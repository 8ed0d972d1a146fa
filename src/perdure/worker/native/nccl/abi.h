/* Layouts of NCCL's profiler plugin interface, as far as perdure reads them.
 *
 * Written from the interface's public definition (NCCL's headers and its profiler README); only
 * the order and types of fields are taken over, since they are what both sides must agree on.
 *
 *   version   first in NCCL    what differs
 *   v3        2.26             a collective names its communicator itself; no GPU timestamps
 *   v4        2.27             init names the communicator; kernelCh has GPU timestamps
 *   v5        2.28             `type` is 64 bits wide; events of API calls; init's arguments moved
 *   v6        2.29             events of copy-engine collectives; otherwise v5
 *
 * NCCL looks for the newest symbol that it knows, ncclProfiler_v6 down to _v1. An event's
 * `parent` is a handle that startEvent returned earlier, possibly in another process (PXN): it
 * is compared, never followed.
 */
#ifndef PERDURE_NCCL_ABI_H
#define PERDURE_NCCL_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Kinds of events: bits of the mask that init returns, and values of a descriptor's type. */
enum {
  EV_GROUP = 1 << 0,
  EV_COLL = 1 << 1,
  EV_P2P = 1 << 2,
  EV_PROXY_OP = 1 << 3,
  EV_PROXY_STEP = 1 << 4,
  EV_PROXY_CTRL = 1 << 5,
  EV_KERNEL_CH = 1 << 6,
  EV_NET_PLUGIN = 1 << 7,
  EV_GROUP_API = 1 << 8,
  EV_COLL_API = 1 << 9,
  EV_P2P_API = 1 << 10,
  EV_KERNEL_LAUNCH = 1 << 11,
  EV_CE_COLL = 1 << 12, /* v6 */
  EV_CE_SYNC = 1 << 13,
  EV_CE_BATCH = 1 << 14,
};

/* States of recordEventState. 0 to 7 are v3's, of a proxy operation. */
enum {
  ST_PROXY_OP_V3_LAST = 7,
  ST_STEP_SEND_GPU = 8,
  ST_STEP_SEND_NET = 9,
  ST_STEP_RECV_NET = 10,
  ST_STEP_RECV_FLUSH = 11,
  ST_STEP_RECV_GPU = 12,
  ST_PROXY_OP_IN_PROGRESS = 19,
  ST_STEP_SEND_PEER = 20,
  ST_NET_UPDATE = 21,
  ST_KERNEL_CH_STOP = 22,
};

struct proxy_op {
  pid_t pid;
  uint8_t channel;
  int peer;
  int n_steps;
  int chunk_bytes;
  int is_send;
};

struct net_event {
  int64_t id; /* low 16 bits: version of *data; next 16: which plugin */
  void *data;
};

/* v3 */
struct coll_v3 {
  const char *name;
  uint64_t comm_hash;
  uint64_t seq;
  const char *func;
  const void *send;
  void *recv;
  size_t count;
  int root;
  const char *datatype;
  uint8_t channels;
  uint8_t warps;
  const char *algo;
  const char *proto;
};

struct p2p_v3 {
  const char *name;
  uint64_t comm_hash;
  const char *func;
  void *buffer;
  const char *datatype;
  size_t count;
  int peer;
};

struct event_v3 {
  uint8_t type;
  void *parent;
  int rank;
  union {
    struct coll_v3 coll;
    struct p2p_v3 p2p;
    struct proxy_op proxy_op;
    struct { int step; } proxy_step;
    struct { uint8_t channel; } kernel;
    struct net_event net;
  };
};

union state_v3 {
  struct { size_t bytes; int steps; } proxy_op;
  struct { int appended; } proxy_ctrl;
};

/* v4 to v6: what they have in common lies at the same offsets; v5 appended a field to coll and
 * p2p, v6 appended kinds. Only the width of `type` differs, which the caller passes apart. */
struct coll_v4 {
  uint64_t seq;
  const char *func;
  const void *send;
  void *recv;
  size_t count;
  int root;
  const char *datatype;
  uint8_t channels;
  uint8_t warps;
  const char *algo;
  const char *proto;
};

struct p2p_v4 {
  const char *func;
  void *buffer;
  const char *datatype;
  size_t count;
  int peer;
  uint8_t channels;
};

struct ce_coll_v6 {
  uint64_t seq;
  const char *func;
  const void *send;
  void *recv;
  size_t count;
  int root;
  const char *datatype;
};

struct event_v4 {
  uint64_t type; /* v4: only the first byte is set */
  void *parent;
  int rank;
  union {
    struct coll_v4 coll;
    struct p2p_v4 p2p;
    struct proxy_op proxy_op;
    struct { int step; } proxy_step;
    struct { uint8_t channel; uint64_t gpu_ns; } kernel;
    struct net_event net;
    struct ce_coll_v6 ce_coll;
  };
};

union state_v4 {
  struct { size_t bytes; } proxy_step;
  struct { int appended; } proxy_ctrl;
  struct { void *data; } net;
  struct { uint64_t gpu_ns; } kernel;
};

/* Events of NCCL's own network plugins: type 1 (InfiniBand) and 2 (sockets), version 1 both. */
enum { NET_IB = 1, NET_SOCKET = 2 };

struct net_ib_v1 {
  uint8_t type;
  struct { int device; uint64_t wr_id; int opcode; int qp; size_t length; } qp;
};

struct net_socket_v1 {
  uint8_t type;
  struct { int fd; int op; size_t length; } sock;
};

typedef void (*logger)(int level, unsigned long flags, const char *file, int line,
                       const char *format, ...);

#define PROFILER(version, event, state, ...)                 \
  struct profiler_v##version {                               \
    const char *name;                                        \
    int (*init)(__VA_ARGS__);                                \
    int (*start)(void *context, void **handle, event *);     \
    int (*stop)(void *handle);                               \
    int (*record)(void *handle, int state_, state *);        \
    int (*finalize)(void *context);                          \
  }

PROFILER(3, struct event_v3, union state_v3, void **, int *);
PROFILER(4, struct event_v4, union state_v4, void **, int *, const char *, uint64_t, int, int,
         int, logger);
PROFILER(5, struct event_v4, union state_v4, void **, uint64_t, int *, const char *, int, int,
         int, logger);

_Static_assert(offsetof(struct event_v3, coll) == 24, "v3");
_Static_assert(offsetof(struct event_v4, coll) == 24, "v4 to v6");
_Static_assert(offsetof(struct coll_v4, proto) == 72, "v4 to v6");
_Static_assert(offsetof(struct p2p_v4, peer) == 32, "v4 to v6");
_Static_assert(sizeof(struct proxy_op) == 24, "v3 to v6");

#endif
