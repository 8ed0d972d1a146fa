/* perdure's NCCL profiler plugin: what NCCL does, written beside the rank's ring as it happens.
 *
 * NCCL calls in from the training thread (operations) and from its proxy threads (transfers).
 * Nothing here locks, allocates or waits after init: a record is claimed by one compare-and-swap
 * and filled by its owner; counters are atomic. Handles are numbers, not pointers, so that one
 * which is stale, foreign or garbage finds no record and does nothing. Whatever goes wrong, NCCL
 * is told success: with no ring, a full disk or another process's file, nothing is recorded.
 */
#define _GNU_SOURCE
#include "abi.h"
#include "layout.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LOAD(at) __atomic_load_n(at, __ATOMIC_ACQUIRE)
#define STORE(at, value) __atomic_store_n(at, (uint64_t)(value), __ATOMIC_RELEASE)
#define ADD(at, value) __atomic_fetch_add(at, (uint64_t)(value), __ATOMIC_RELAXED)
#define CAS(at, old, new) \
  __atomic_compare_exchange_n(at, old, new, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)

enum { SUCCESS = 0, KIND_SHIFT = 60 };
enum { OP_COLL, OP_P2P, OP_CE };
#define NUMBER_MASK ((UINT64_C(1) << KIND_SHIFT) - 1)
#define MASK_DEFAULT (EV_COLL | EV_P2P | EV_PROXY_OP | EV_PROXY_STEP | EV_KERNEL_CH | EV_NET_PLUGIN)

static const struct { uint64_t words, count; } SHAPE[REGIONS] = {
    [COMM] = {C_WORDS, 64},     [OP] = {O_WORDS, 1024},   [PROXY] = {P_WORDS, 1024},
    [STEP] = {S_WORDS, 4096},   [KERNEL] = {K_WORDS, 2048}, [NET] = {N_WORDS, 1024},
    [PEER] = {L_WORDS, 512},
};

static uint64_t *map; /* NULL: nothing is recorded */
static size_t map_bytes;
static uint64_t *region_at[REGIONS];
static uint64_t event_mask;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER; /* init and finalize only */

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
}

static void put_text(uint64_t *at, const char *text, size_t bytes) {
  char *to = (char *)at;
  size_t n = 0;
  if (text != NULL)
    for (; n + 1 < bytes && text[n] != 0; n++) to[n] = text[n];
  memset(to + n, 0, bytes - n);
}

/* --- the file --------------------------------------------------------------------------------- */

static void forget_in_child(void) { /* A forked child must not write. */
  map = NULL;
  pthread_mutex_init(&opening, NULL);
}

/* Return whether the ring at `path` belongs to another process: a child that inherited its name. */
static bool is_foreign(const char *path) {
  uint64_t head[5] = {0}; /* magic, version, rank, generation, pid: perdure/model/ring.py */
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return true;
  ssize_t got = read(fd, head, sizeof head);
  close(fd);
  if (got != (ssize_t)sizeof head || memcmp(head, "PERDURE", 8) != 0) return true;
  return head[4] != 0 && head[4] != (uint64_t)getpid();
}

static void lay_out(uint64_t *memory) {
  uint64_t at = HEADER_WORDS;
  for (int r = 0; r < REGIONS; r++) {
    uint64_t *header = memory + H_REGION(r);
    header[0] = at;
    header[1] = SHAPE[r].words;
    header[2] = SHAPE[r].count;
    at += SHAPE[r].words * SHAPE[r].count;
  }
  memory[H_VERSION] = LAYOUT_VERSION;
  memory[H_PID] = (uint64_t)getpid();
  memory[H_STARTED] = now_ns();
  memcpy(&at, "PERDNCCL", sizeof at);
  STORE(&memory[H_MAGIC], at);
}

static bool open_file(const char *path) {
  size_t bytes = HEADER_WORDS * 8;
  for (int r = 0; r < REGIONS; r++) bytes += SHAPE[r].words * SHAPE[r].count * 8;
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return false;
  /* Blocks are reserved: a store into a hole of a full disk would kill the rank. */
  int failed = posix_fallocate(fd, 0, (off_t)bytes);
  uint64_t *memory =
      failed ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) return false;
  uint64_t pid = memory[H_PID];
  bool known = memcmp(memory, "PERDNCCL", 8) == 0 && memory[H_VERSION] == LAYOUT_VERSION;
  if (!known || pid != (uint64_t)getpid()) {
    if (known && pid != 0 && (kill((pid_t)pid, 0) == 0 || errno == EPERM)) {
      munmap(memory, bytes);
      return false;
    }
    memset(memory, 0, bytes);
    lay_out(memory);
  }
  for (int r = 0; r < REGIONS; r++) region_at[r] = memory + memory[H_REGION(r)];
  map_bytes = bytes;
  __atomic_store_n(&map, memory, __ATOMIC_RELEASE);
  return true;
}

/* Open the file once. NCCL may unload and load this library again: the file then goes on. */
static bool ensure_open(void) {
  static bool tried, at_fork;
  pthread_mutex_lock(&opening);
  if (!tried) {
    tried = true;
    char path[4096];
    const char *ring = getenv("PERDURE_RING"), *mask = getenv("PERDURE_NCCL_EVENTS");
    event_mask = MASK_DEFAULT;
    if (mask != NULL && mask[0] != 0) event_mask = strtoull(mask, NULL, 0);
    int n = snprintf(path, sizeof path, "%s.nccl", ring != NULL ? ring : "");
    if (ring != NULL && ring[0] != 0 && n > 0 && (size_t)n < sizeof path && event_mask != 0 &&
        !is_foreign(ring) && open_file(path) && !at_fork)
      at_fork = pthread_atfork(NULL, NULL, forget_in_child) == 0;
  }
  pthread_mutex_unlock(&opening);
  return map != NULL;
}

__attribute__((destructor)) static void close_file(void) {
  uint64_t *memory = __atomic_exchange_n(&map, NULL, __ATOMIC_ACQ_REL);
  if (memory != NULL) munmap(memory, map_bytes);
}

/* --- records ---------------------------------------------------------------------------------- */

static uint64_t *slot_of(int region, uint64_t number) {
  return region_at[region] + (number % SHAPE[region].count) * SHAPE[region].words;
}

static bool comm_lives(uint64_t slot) {
  if (slot >= SHAPE[COMM].count) return false;
  return LOAD(&region_at[COMM][slot * C_WORDS + C_CLOSED]) == 0;
}

/* Return whether a record's event has not ended: it is what a hang is read from. */
static bool is_open(int region, uint64_t *s) {
  static const uint8_t stop[REGIONS] = {
      [OP] = O_STOP, [PROXY] = P_STOP, [STEP] = S_STOP, [KERNEL] = K_STOP, [NET] = N_STOP};
  if (!comm_lives(LOAD(&s[1]))) return false;
  if (LOAD(&s[stop[region]]) == 0) return true;
  return region == OP && (LOAD(&s[O_KERNELS_STARTED]) > LOAD(&s[O_KERNELS_STOPPED]) ||
                          LOAD(&s[O_PROXIES_STARTED]) > LOAD(&s[O_PROXIES_STOPPED]));
}

/* Claim a record and zero it; `finish` makes it readable. NULL: dropped, and counted. */
static uint64_t *claim(int region, uint64_t comm, uint64_t *number) {
  uint64_t *header = map + H_REGION(region);
  for (int i = 0; i < TRIES; i++) {
    uint64_t n = ADD(&header[3], 1) + 1, *s = slot_of(region, n), old = LOAD(&s[0]);
    if (old == WRITING || (old != 0 && is_open(region, s)) || !CAS(&s[0], &old, WRITING)) continue;
    memset(s + 1, 0, (SHAPE[region].words - 1) * 8);
    s[1] = comm;
    *number = n;
    return s;
  }
  ADD(&header[4], 1);
  return NULL;
}

static void *finish(int region, uint64_t *s, uint64_t number) {
  s[SHAPE[region].words - 1] = number;
  STORE(&s[0], number);
  return (void *)(uintptr_t)((uint64_t)(region + 1) << KIND_SHIFT | number);
}

/* Return the record of a handle if it is of this region and still there. */
static uint64_t *find(int region, const void *handle) {
  uint64_t h = (uint64_t)(uintptr_t)handle, number = h & NUMBER_MASK;
  if (h >> KIND_SHIFT != (uint64_t)(region + 1) || number == 0) return NULL;
  uint64_t *s = slot_of(region, number);
  return LOAD(&s[0]) == number ? s : NULL;
}

static uint64_t number_of(int region, const void *handle) {
  uint64_t h = (uint64_t)(uintptr_t)handle;
  return h >> KIND_SHIFT == (uint64_t)(region + 1) ? h & NUMBER_MASK : 0;
}

static uint64_t *comm_at(uint64_t slot) { return region_at[COMM] + slot * C_WORDS; }

/* Return the slot of a link's totals, which outlive the operations; WRITING where all are taken. */
static uint64_t find_link(uint64_t comm, int peer, bool is_send) {
  uint64_t serial = LOAD(&comm_at(comm)[0]);
  uint64_t key = (serial & 0x3fffffff) << 33 | (uint64_t)(uint32_t)peer << 1 | is_send;
  uint64_t start = (key * UINT64_C(0x9e3779b97f4a7c15)) >> 32;
  for (int i = 0; i < TRIES; i++) {
    uint64_t slot = (start + (uint64_t)i) % SHAPE[PEER].count;
    uint64_t *s = region_at[PEER] + slot * L_WORDS, old = LOAD(&s[0]);
    if (old == key) return slot; /* Two threads at once may make two; a reader adds them up. */
    bool dead = old != 0 && old != WRITING && !comm_lives(LOAD(&s[L_COMM]));
    if ((old == 0 || dead) && CAS(&s[0], &old, WRITING)) {
      memset(s + 1, 0, (L_WORDS - 1) * 8);
      s[L_COMM] = comm;
      s[L_PEER] = (uint64_t)(int64_t)peer;
      s[L_IS_SEND] = is_send;
      STORE(&s[0], key);
      return slot;
    }
  }
  ADD(&map[H_REGION(PEER) + 4], 1);
  return WRITING;
}

static uint64_t *link_at(uint64_t slot) {
  return slot < SHAPE[PEER].count ? region_at[PEER] + slot * L_WORDS : NULL;
}

/* --- communicators ---------------------------------------------------------------------------- */

static int begin(void **context, int *mask, int api, const char *name, uint64_t hash, int nodes,
                 int ranks, int rank) {
  if (context != NULL) *context = NULL;
  if (mask != NULL) *mask = 0;
  if (context == NULL || mask == NULL || !ensure_open()) return SUCCESS;
  *mask = (int)event_mask;
  uint64_t *chosen = NULL, oldest = UINT64_MAX;
  pthread_mutex_lock(&opening);
  for (uint64_t i = 0; i < SHAPE[COMM].count; i++) {
    uint64_t *s = comm_at(i), closed = LOAD(&s[C_CLOSED]);
    uint64_t age = LOAD(&s[0]) == 0 ? 0 : closed != 0 ? closed : UINT64_MAX;
    if (age < oldest) oldest = age, chosen = s;
  }
  if (chosen == NULL) {
    ADD(&map[H_REGION(COMM) + 4], 1); /* Too many: this one is not recorded. */
  } else {
    STORE(&chosen[0], WRITING);
    memset(chosen + 1, 0, (C_WORDS - 1) * 8);
    chosen[C_HASH] = hash;
    chosen[C_RANKS] = (uint64_t)(int64_t)ranks;
    chosen[C_NODES] = (uint64_t)(int64_t)nodes;
    chosen[C_RANK] = (uint64_t)(int64_t)rank;
    chosen[C_API] = (uint64_t)api;
    chosen[C_OPENED] = now_ns();
    put_text(&chosen[C_NAME], name, 64);
    uint64_t serial = ADD(&map[H_REGION(COMM) + 3], 1) + 1;
    chosen[C_WORDS - 1] = serial;
    STORE(&chosen[0], serial);
    map[H_API] = (uint64_t)api;
    map[H_MASK] = event_mask;
    *context = (void *)(uintptr_t)((uint64_t)(chosen - comm_at(0)) / C_WORDS + 1);
  }
  pthread_mutex_unlock(&opening);
  return SUCCESS;
}

static int end(void *context) {
  uint64_t slot = (uint64_t)(uintptr_t)context - 1;
  if (map != NULL && slot < SHAPE[COMM].count) STORE(&comm_at(slot)[C_CLOSED], now_ns());
  return SUCCESS;
}

/* --- starts ----------------------------------------------------------------------------------- */

static uint64_t bytes_of(const char *datatype, size_t count) {
  /* ncclFloat32, ncclInt8, ncclBfloat16, ncclFloat8e4m3: bits are the first number. */
  uint64_t bits = 0;
  if (datatype == NULL) return 0;
  for (int i = 0; i < 32 && datatype[i] != 0; i++) {
    if (datatype[i] >= '0' && datatype[i] <= '9')
      bits = bits * 10 + (uint64_t)(datatype[i] - '0');
    else if (bits != 0)
      break;
  }
  return bits / 8 * count;
}

struct op {
  int kind, peer, channels;
  uint64_t seq, count;
  const char *func, *algo, *proto, *datatype;
};

static void *start_op(uint64_t comm, uint64_t now, const struct op *op) {
  uint64_t number, *s = claim(OP, comm, &number), *c = comm_at(comm);
  if (s == NULL) return NULL;
  s[O_KIND] = (uint64_t)op->kind;
  s[O_SEQ] = op->seq;
  s[O_COUNT] = op->count;
  s[O_BYTES] = bytes_of(op->datatype, op->count);
  s[O_PEER] = (uint64_t)(int64_t)op->peer;
  s[O_CHANNELS] = (uint64_t)op->channels;
  s[O_START] = now;
  put_text(&s[O_FUNC], op->func, 16);
  put_text(&s[O_ALGO], op->algo, 16);
  put_text(&s[O_PROTO], op->proto, 16);
  put_text(&s[O_DTYPE], op->datatype, 16);
  ADD(&c[op->kind == OP_P2P ? C_P2PS : C_COLLS], 1);
  STORE(&c[C_LAST_OP], now);
  return finish(OP, s, number);
}

static void *start_proxy(uint64_t comm, uint64_t now, const void *parent, int rank,
                         const struct proxy_op *op) {
  uint64_t number, *s = claim(PROXY, comm, &number), *l;
  if (s == NULL) return NULL;
  /* With PXN another process's proxy works for us, or ours for it: its numbers are not ours. */
  uint64_t *mine = op->pid == getpid() ? find(OP, parent) : NULL;
  s[P_PARENT] = mine != NULL ? number_of(OP, parent) : 0;
  s[P_CHANNEL] = op->channel;
  s[P_PEER] = (uint64_t)(int64_t)op->peer;
  s[P_IS_SEND] = op->is_send != 0;
  s[P_STEPS] = (uint64_t)(int64_t)op->n_steps;
  s[P_CHUNK] = (uint64_t)(int64_t)op->chunk_bytes;
  s[P_PID] = (uint64_t)op->pid;
  s[P_RANK] = (uint64_t)(int64_t)rank;
  s[P_START] = now;
  s[P_STATE] = UINT64_MAX;
  s[P_LINK] = op->pid == getpid() ? find_link(comm, op->peer, op->is_send != 0) : WRITING;
  if ((l = link_at(s[P_LINK])) != NULL) {
    ADD(&l[L_OPS_STARTED], 1);
    STORE(&l[L_LAST], now);
  }
  if (mine != NULL) ADD(&mine[O_PROXIES_STARTED], 1);
  return finish(PROXY, s, number);
}

static void *start_step(uint64_t comm, uint64_t now, const void *parent, int step) {
  uint64_t number, *s = claim(STEP, comm, &number), *p;
  if (s == NULL) return NULL;
  s[S_PARENT] = number_of(PROXY, parent);
  s[S_STEP] = (uint64_t)(int64_t)step;
  s[S_START] = now;
  s[S_STATE] = UINT64_MAX;
  if ((p = find(PROXY, parent)) != NULL) ADD(&p[P_STEPS_STARTED], 1);
  return finish(STEP, s, number);
}

static void *start_kernel(uint64_t comm, uint64_t now, const void *parent, int channel,
                          uint64_t gpu_ns) {
  uint64_t number, *s = claim(KERNEL, comm, &number), *o, zero = 0;
  if (s == NULL) return NULL;
  s[K_PARENT] = number_of(OP, parent);
  s[K_CHANNEL] = (uint64_t)channel;
  s[K_START] = now;
  s[K_GPU_START] = gpu_ns;
  if ((o = find(OP, parent)) != NULL) {
    ADD(&o[O_KERNELS_STARTED], 1);
    CAS(&o[O_FIRST_KERNEL], &zero, now);
    for (uint64_t old = LOAD(&o[O_GPU_START]); gpu_ns != 0 && (old == 0 || gpu_ns < old);)
      if (CAS(&o[O_GPU_START], &old, gpu_ns)) break;
  }
  return finish(KERNEL, s, number);
}

static void *start_net(uint64_t comm, uint64_t now, const void *parent, const struct net_event *e) {
  uint64_t number, *s = claim(NET, comm, &number);
  if (s == NULL) return NULL;
  s[N_PARENT] = number_of(STEP, parent);
  s[N_PLUGIN] = (uint64_t)e->id;
  s[N_START] = now;
  int plugin = (int)(e->id >> 16 & 0xffff), version = (int)(e->id & 0xffff);
  if (e->data != NULL && version == 1 && plugin == NET_IB) {
    const struct net_ib_v1 *d = e->data;
    s[N_TYPE] = d->type;
    s[N_DEVICE] = (uint64_t)(int64_t)d->qp.device;
    s[N_OPCODE] = (uint64_t)(int64_t)d->qp.opcode;
    s[N_QP] = (uint64_t)(int64_t)d->qp.qp;
    s[N_WORK] = d->qp.wr_id;
    s[N_BYTES] = d->qp.length;
  } else if (e->data != NULL && version == 1 && plugin == NET_SOCKET) {
    const struct net_socket_v1 *d = e->data;
    s[N_TYPE] = d->type;
    s[N_DEVICE] = (uint64_t)(int64_t)d->sock.fd;
    s[N_OPCODE] = (uint64_t)(int64_t)d->sock.op;
    s[N_BYTES] = d->sock.length;
  }
  return finish(NET, s, number);
}

static bool enter(void *context, void **handle, const void *event, uint64_t *comm, uint64_t *now) {
  if (handle != NULL) *handle = NULL;
  *comm = (uint64_t)(uintptr_t)context - 1;
  if (map == NULL || handle == NULL || event == NULL || *comm >= SHAPE[COMM].count) return false;
  *now = now_ns();
  STORE(&map[H_BEAT], *now);
  return true;
}

static int start_v3(void *context, void **handle, struct event_v3 *e) {
  uint64_t comm, now;
  if (!enter(context, handle, e, &comm, &now)) return SUCCESS;
  if (e->type == EV_COLL || e->type == EV_P2P) { /* v3's init does not say which one it is. */
    uint64_t *c = comm_at(comm);
    const char *name = e->type == EV_COLL ? e->coll.name : e->p2p.name;
    if (LOAD(&c[C_HASH]) == 0) {
      put_text(&c[C_NAME], name, 64);
      STORE(&c[C_RANK], (int64_t)e->rank);
      STORE(&c[C_HASH], e->type == EV_COLL ? e->coll.comm_hash : e->p2p.comm_hash);
    }
  }
  if (e->type == EV_COLL) {
    const struct coll_v3 *c = &e->coll;
    struct op op = {OP_COLL, c->root, c->channels, c->seq, c->count,
                    c->func, c->algo, c->proto,    c->datatype};
    *handle = start_op(comm, now, &op);
  } else if (e->type == EV_P2P) {
    const struct p2p_v3 *p = &e->p2p;
    struct op op = {OP_P2P, p->peer, 0, 0, p->count, p->func, NULL, NULL, p->datatype};
    *handle = start_op(comm, now, &op);
  } else if (e->type == EV_PROXY_OP) {
    *handle = start_proxy(comm, now, e->parent, e->rank, &e->proxy_op);
  } else if (e->type == EV_PROXY_STEP) {
    *handle = start_step(comm, now, e->parent, e->proxy_step.step);
  } else if (e->type == EV_KERNEL_CH) {
    *handle = start_kernel(comm, now, e->parent, e->kernel.channel, 0);
  } else if (e->type == EV_NET_PLUGIN) {
    *handle = start_net(comm, now, e->parent, &e->net);
  }
  return SUCCESS;
}

static int start_common(void *context, void **handle, struct event_v4 *e, uint64_t type) {
  uint64_t comm, now;
  if (!enter(context, handle, e, &comm, &now)) return SUCCESS;
  if (type == EV_COLL) {
    const struct coll_v4 *c = &e->coll;
    struct op op = {OP_COLL, c->root, c->channels, c->seq, c->count,
                    c->func, c->algo, c->proto,    c->datatype};
    *handle = start_op(comm, now, &op);
  } else if (type == EV_P2P) {
    const struct p2p_v4 *p = &e->p2p;
    struct op op = {OP_P2P, p->peer, p->channels, 0, p->count, p->func, NULL, NULL, p->datatype};
    *handle = start_op(comm, now, &op);
  } else if (type == EV_CE_COLL) {
    const struct ce_coll_v6 *c = &e->ce_coll;
    struct op op = {OP_CE, c->root, 0, c->seq, c->count, c->func, "CE", NULL, c->datatype};
    *handle = start_op(comm, now, &op);
  } else if (type == EV_PROXY_OP) {
    *handle = start_proxy(comm, now, e->parent, e->rank, &e->proxy_op);
  } else if (type == EV_PROXY_STEP) {
    *handle = start_step(comm, now, e->parent, e->proxy_step.step);
  } else if (type == EV_KERNEL_CH) {
    *handle = start_kernel(comm, now, e->parent, e->kernel.channel, e->kernel.gpu_ns);
  } else if (type == EV_NET_PLUGIN) {
    *handle = start_net(comm, now, e->parent, &e->net);
  } /* Groups, API calls, launches, CE batches: their handle is NULL, and NCCL skips the rest. */
  return SUCCESS;
}

static int start_v4(void *context, void **handle, struct event_v4 *e) {
  return start_common(context, handle, e, e != NULL ? *(const uint8_t *)e : 0);
}

static int start_v5(void *context, void **handle, struct event_v4 *e) {
  return start_common(context, handle, e, e != NULL && e->type < EV_CE_COLL ? e->type : 0);
}

static int start_v6(void *context, void **handle, struct event_v4 *e) {
  return start_common(context, handle, e, e != NULL ? e->type : 0);
}

/* --- states ----------------------------------------------------------------------------------- */

enum { WAIT_SEND_NET = 2 };

static uint64_t wait_of(int state) {
  switch (state) {
    case ST_STEP_SEND_GPU: return 0;
    case ST_STEP_SEND_PEER: return 1;
    case ST_STEP_SEND_NET: return WAIT_SEND_NET;
    case ST_STEP_RECV_NET: return 3;
    case ST_STEP_RECV_FLUSH: return 4;
    case ST_STEP_RECV_GPU: return 5;
    default: return UINT64_MAX;
  }
}

static void book_busy(uint64_t *l, uint64_t now) {
  uint64_t since = LOAD(&l[L_SENDING_SINCE]);
  STORE(&l[L_SENDING_SINCE], 0);
  if (since != 0 && since < now) ADD(&l[L_BUSY], now - since);
}

/* A link is busy while the network has any of its steps to send, however many at once. */
static void note_sending(uint64_t *l, bool begins, uint64_t now) {
  if (begins) {
    if (ADD(&l[L_SENDING], 1) == 0) STORE(&l[L_SENDING_SINCE], now);
  } else if (LOAD(&l[L_SENDING]) != 0 && ADD(&l[L_SENDING], UINT64_MAX) == 1) {
    book_busy(l, now);
  }
}

/* Book the time since a step's last state, and enter `state` (UINT64_MAX: it is over). */
static void change_step(uint64_t *s, uint64_t state, uint64_t bytes, uint64_t now) {
  uint64_t number = LOAD(&s[S_PARENT]), old = LOAD(&s[S_STATE]), *l = NULL;
  uint64_t *p = number != 0 ? slot_of(PROXY, number) : NULL;
  if (p != NULL && LOAD(&p[0]) != number) p = NULL;
  if (p != NULL) l = link_at(LOAD(&p[P_LINK]));
  uint64_t spent = now - LOAD(&s[S_STATE_SINCE]);
  if (old < WAITS) {
    ADD(&s[S_WAIT + old], spent);
    if (p != NULL) ADD(&p[P_WAIT + old], spent);
    if (l != NULL) ADD(&l[L_WAIT + old], spent);
  }
  if (l != NULL && (old == WAIT_SEND_NET) != (state == WAIT_SEND_NET))
    note_sending(l, state == WAIT_SEND_NET, now);
  STORE(&s[S_STATE], state);
  STORE(&s[S_STATE_SINCE], now);
  if (bytes != 0) {
    STORE(&s[S_BYTES], bytes);
    if (p != NULL) ADD(&p[P_BYTES], bytes);
    if (l != NULL) ADD(&l[L_BYTES], bytes);
  }
  if (p != NULL) {
    STORE(&p[P_STATE], state);
    STORE(&p[P_STATE_SINCE], now);
  }
  if (l != NULL) STORE(&l[L_LAST], now);
}

static int record_common(void *handle, int state, uint64_t bytes, uint64_t gpu_ns) {
  uint64_t *s, *o, now;
  if (map == NULL || handle == NULL) return SUCCESS;
  now = now_ns();
  STORE(&map[H_BEAT], now);
  if ((s = find(STEP, handle)) != NULL) {
    uint64_t wait = wait_of(state);
    if (wait < WAITS && wait != LOAD(&s[S_STATE])) change_step(s, wait, bytes, now);
  } else if ((s = find(PROXY, handle)) != NULL) {
    if (state == ST_PROXY_OP_IN_PROGRESS) STORE(&s[P_IN_PROGRESS], now);
    if (state <= ST_PROXY_OP_V3_LAST && bytes > LOAD(&s[P_BYTES])) { /* v3: the sum so far */
      uint64_t *l = link_at(LOAD(&s[P_LINK]));
      if (l != NULL) ADD(&l[L_BYTES], bytes - LOAD(&s[P_BYTES]));
      STORE(&s[P_BYTES], bytes);
    }
  } else if ((s = find(KERNEL, handle)) != NULL) {
    if (state != ST_KERNEL_CH_STOP) return SUCCESS;
    STORE(&s[K_GPU_STOP], gpu_ns);
    uint64_t number = LOAD(&s[K_PARENT]);
    o = number != 0 ? slot_of(OP, number) : NULL;
    if (o == NULL || LOAD(&o[0]) != number) return SUCCESS;
    for (uint64_t old = LOAD(&o[O_GPU_STOP]); gpu_ns > old;)
      if (CAS(&o[O_GPU_STOP], &old, gpu_ns)) break;
  } else if ((s = find(NET, handle)) != NULL) {
    ADD(&s[N_UPDATES], 1);
  }
  return SUCCESS;
}

static int record_v3(void *handle, int state, union state_v3 *args) {
  bool of_op = state >= 0 && state <= ST_PROXY_OP_V3_LAST;
  return record_common(handle, state, of_op && args != NULL ? args->proxy_op.bytes : 0, 0);
}

static int record_v4(void *handle, int state, union state_v4 *args) {
  /* The size is that of the step only where it has just been posted or received. */
  bool sized = state == ST_STEP_SEND_NET || state == ST_STEP_RECV_FLUSH;
  uint64_t bytes = sized && args != NULL ? args->proxy_step.bytes : 0;
  uint64_t gpu_ns = state == ST_KERNEL_CH_STOP && args != NULL ? args->kernel.gpu_ns : 0;
  return record_common(handle, state, bytes, gpu_ns);
}

/* --- stops ------------------------------------------------------------------------------------ */

static bool stop_once(uint64_t *at, uint64_t now) {
  uint64_t zero = 0;
  return CAS(at, &zero, now);
}

static int stop(void *handle) {
  uint64_t *s, *parent, now, number;
  if (map == NULL || handle == NULL) return SUCCESS;
  now = now_ns();
  STORE(&map[H_BEAT], now);
  if ((s = find(STEP, handle)) != NULL) {
    if (LOAD(&s[S_STOP]) != 0) return SUCCESS;
    change_step(s, UINT64_MAX, 0, now);
    if (!stop_once(&s[S_STOP], now) || (number = LOAD(&s[S_PARENT])) == 0) return SUCCESS;
    parent = slot_of(PROXY, number);
    if (LOAD(&parent[0]) != number) return SUCCESS;
    ADD(&parent[P_STEPS_STOPPED], 1);
    uint64_t *l = link_at(LOAD(&parent[P_LINK]));
    if (l != NULL) ADD(&l[L_STEPS], 1);
  } else if ((s = find(PROXY, handle)) != NULL) {
    if (!stop_once(&s[P_STOP], now)) return SUCCESS;
    uint64_t *l = link_at(LOAD(&s[P_LINK]));
    if (l != NULL && ADD(&l[L_OPS_STOPPED], 1) + 1 == LOAD(&l[L_OPS_STARTED])) {
      STORE(&l[L_SENDING], 0); /* A step whose end nobody told would keep it busy for ever. */
      book_busy(l, now);
    }
    if ((number = LOAD(&s[P_PARENT])) == 0) return SUCCESS;
    parent = slot_of(OP, number);
    if (LOAD(&parent[0]) != number) return SUCCESS;
    STORE(&parent[O_LAST_PROXY], now);
    ADD(&parent[O_PROXIES_STOPPED], 1);
  } else if ((s = find(KERNEL, handle)) != NULL) {
    if (!stop_once(&s[K_STOP], now) || (number = LOAD(&s[K_PARENT])) == 0) return SUCCESS;
    parent = slot_of(OP, number);
    if (LOAD(&parent[0]) != number) return SUCCESS;
    STORE(&parent[O_LAST_KERNEL], now);
    ADD(&parent[O_KERNELS_STOPPED], 1);
  } else if ((s = find(OP, handle)) != NULL) {
    stop_once(&s[O_STOP], now);
  } else if ((s = find(NET, handle)) != NULL) {
    stop_once(&s[N_STOP], now);
  }
  return SUCCESS;
}

/* --- doors ------------------------------------------------------------------------------------ */

static int init_v3(void **context, int *mask) { return begin(context, mask, 3, NULL, 0, 0, 0, -1); }

static int init_v4(void **context, int *mask, const char *name, uint64_t hash, int nodes, int ranks,
                   int rank, logger log) {
  (void)log;
  return begin(context, mask, 4, name, hash, nodes, ranks, rank);
}

static int init_v5(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks,
                   int rank, logger log) {
  (void)log;
  return begin(context, mask, 5, name, id, nodes, ranks, rank);
}

static int init_v6(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks,
                   int rank, logger log) {
  (void)log;
  int done = begin(context, mask, 6, name, id, nodes, ranks, rank);
  if (mask != NULL && (*mask & EV_COLL) != 0) *mask |= EV_CE_COLL;
  return done;
}

#define EXPORT __attribute__((visibility("default")))
EXPORT struct profiler_v3 ncclProfiler_v3 = {"perdure", init_v3, start_v3, stop, record_v3, end};
EXPORT struct profiler_v4 ncclProfiler_v4 = {"perdure", init_v4, start_v4, stop, record_v4, end};
EXPORT struct profiler_v5 ncclProfiler_v5 = {"perdure", init_v5, start_v5, stop, record_v4, end};
EXPORT struct profiler_v5 ncclProfiler_v6 = {"perdure", init_v6, start_v6, stop, record_v4, end};
