/* Layout of the file that the plugin writes beside a rank's ring; drawn in docs/nccl.md and read
 * by perdure/model/signals/nccl.py. All numbers are native 64-bit words; times are CLOCK_MONOTONIC ns.
 *
 * A record's first word is its number, counted from 1 within its region and stored last (0: never
 * used; all ones: being written); its last word repeats it. Number n lies in slot n % count. What
 * has not ended is not overwritten while its communicator lives: the writer goes on to the next
 * slot, and after TRIES of them drops the event and counts it.
 */
#ifndef PERDURE_NCCL_LAYOUT_H
#define PERDURE_NCCL_LAYOUT_H

#define LAYOUT_VERSION 2
#define HEADER_WORDS 64
#define TRIES 64
#define WRITING UINT64_MAX

enum { COMM, OP, PROXY, STEP, KERNEL, NET, PEER, REGIONS };

enum { /* header */
  H_MAGIC, H_VERSION, H_PID, H_API, H_MASK, H_STARTED, H_BEAT,
  H_REGIONS = 8,  /* per region: first word, words of a record, records, number last given, dropped */
};
#define H_REGION(region) (H_REGIONS + 5 * (region))

enum { /* communicator */
  C_HASH = 1, C_RANKS, C_NODES, C_RANK, C_OPENED, C_CLOSED, C_API, C_COLLS, C_P2PS, C_LAST_OP,
  C_NAME = 12, C_WORDS = 24
};
enum { /* collective, send or receive, copy-engine collective */
  O_COMM = 1, O_KIND, O_SEQ, O_COUNT, O_BYTES, O_PEER, O_CHANNELS, O_START, O_STOP,
  O_KERNELS_STARTED, O_KERNELS_STOPPED, O_FIRST_KERNEL, O_LAST_KERNEL, O_GPU_START, O_GPU_STOP,
  O_PROXIES_STARTED, O_PROXIES_STOPPED, O_LAST_PROXY,
  O_FUNC = 20, O_ALGO = 22, O_PROTO = 24, O_DTYPE = 26, O_WORDS = 32
};
enum { WAITS = 6 }; /* send: GPU, peer, net; receive: net, flush, GPU */
enum { /* proxy operation: one channel of one op, one direction */
  P_COMM = 1, P_PARENT, P_CHANNEL, P_PEER, P_IS_SEND, P_STEPS, P_CHUNK, P_PID, P_RANK, P_START,
  P_STOP, P_IN_PROGRESS, P_STEPS_STARTED, P_STEPS_STOPPED, P_BYTES, P_STATE, P_STATE_SINCE,
  P_LINK, P_WAIT = 20, P_WORDS = 32
};
enum { /* proxy step: one transfer */
  S_COMM = 1, S_PARENT, S_STEP, S_START, S_STOP, S_STATE, S_STATE_SINCE, S_BYTES, S_WAIT = 9,
  S_WORDS = 16
};
enum { /* kernel channel */
  K_COMM = 1, K_PARENT, K_CHANNEL, K_START, K_STOP, K_GPU_START, K_GPU_STOP, K_WORDS = 16
};
enum { /* event of the network plugin */
  N_COMM = 1, N_PARENT, N_PLUGIN, N_TYPE, N_DEVICE, N_OPCODE, N_QP, N_WORK, N_BYTES, N_START,
  N_STOP, N_UPDATES, N_WORDS = 16
};
enum { /* totals of one directed link of a communicator; no repeated number at its end */
  L_COMM = 1, L_PEER, L_IS_SEND, L_OPS_STARTED, L_OPS_STOPPED, L_STEPS, L_BYTES, L_LAST,
  L_WAIT = 9, L_SENDING = 16, L_SENDING_SINCE, L_BUSY, L_WORDS = 24
};

#endif
