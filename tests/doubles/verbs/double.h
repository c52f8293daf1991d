// A stand-in for libibverbs over the memory of other processes of this host: what one process
// registers and another one reads or writes by work requests moves by process_vm_readv(2) and
// process_vm_writev(2). It is a test double, not a network: it keeps to the rules that programs
// break (bounds and permissions of regions, states of queue pairs, credits, order, flushes), and
// breaks things on demand.
//
// - A GID carries the pid of its process in its last four bytes.
// - Each process publishes its regions and queue pairs in a file of its own, `struct publication`,
//   which peers map; so a key is checked by the rules of the process that owns it.
// - Work requests are carried out by one thread per opened device, in order per queue pair.
// - `faults.c` says what can be made to go wrong.

#ifndef HKV_VERBS_DOUBLE_H
#define HKV_VERBS_DOUBLE_H

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum {
  REGIONS_MAX = 1 << 15,
  QUEUE_PAIRS_MAX = 1 << 9,
  RECEIVES_MAX = 1 << 10,
  SGE_MAX = 16,
  INLINE_BYTES_MAX = 512,
  SEND_REQUESTS_MAX = 1 << 15,
  CQE_MAX = 1 << 17,
  GIDS = 4,
  // Bytes between two looks at the regions and at the states of queue pairs.
  CHUNK_BYTES = 1 << 16,
};

#define MESSAGE_BYTES_MAX (1u << 30)

// A registered region, as peers see it. `key` is 0 while the slot is free; its low byte counts
// registrations, so that the key of a region that is gone never becomes valid again by chance.
struct region {
  _Atomic uint32_t key;
  uint32_t access;
  uint64_t address;
  uint64_t bytes;
  uint64_t domain;
};

struct receive {
  uint64_t wr_id;
  int num_sge;
  struct ibv_sge sge[4];
};

// What became of a receive: filled by the sender, polled by the owner.
struct received {
  uint64_t wr_id;
  uint32_t bytes;
  uint32_t imm;
  uint32_t flags;
  enum ibv_wc_opcode opcode;
};

// A queue pair as peers see it. `lock` guards everything below it, across processes.
struct published_qp {
  _Atomic uint32_t number;
  pthread_mutex_t lock;
  uint32_t state;
  uint32_t access;
  uint32_t peer_pid;
  uint32_t peer_number;
  uint64_t domain;
  uint32_t receive_head, receive_tail;
  uint32_t received_head, received_tail;
  uint32_t channel;
  uint32_t cq;
  uint32_t armed;
  struct receive receives[RECEIVES_MAX];
  struct received received[RECEIVES_MAX];
};

struct publication {
  _Atomic uint32_t ready;
  uint32_t pid;
  // Held for writing by whoever removes a region, for reading by whoever writes through one.
  pthread_mutex_t gate;
  struct region regions[REGIONS_MAX];
  struct published_qp qps[QUEUE_PAIRS_MAX];
};

// A posted work request; the scatter list is copied.
struct request {
  struct request *next;
  struct ibv_send_wr wr;
  struct ibv_sge sge[SGE_MAX];
  uint8_t inline_data[INLINE_BYTES_MAX];
};

struct completion {
  struct ibv_wc wc;
  // Send queue entries that are free once it is polled.
  uint32_t frees;
};

struct channel {
  struct ibv_comp_channel base;
  uint32_t id;
};

struct cq {
  struct ibv_cq base;
  uint32_t id;
  pthread_mutex_t lock;
  struct completion *ring;
  uint32_t capacity, head, count;
  // 0: not armed, 1: for any completion, 2: for solicited ones.
  int armed;
  struct qp *receivers;
};

struct qp {
  struct ibv_qp base;
  struct published_qp *published;
  uint32_t index;
  struct ibv_qp_attr attr;
  struct ibv_qp_cap cap;
  bool signal_all;
  // Of the device's queue; `device.lock` guards all of it.
  struct request *first, *last;
  bool queued, busy;
  struct qp *next_queued;
  uint64_t not_before_ns;
  uint32_t rnr_tries;
  uint32_t outstanding, unreported;
  struct qp *next_receiver;
};

struct device {
  struct ibv_context base;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  pthread_t thread;
  bool started, stopping;
  struct qp *first, *last;
  int async_write;
};

struct domain {
  struct ibv_pd base;
  uint64_t id;
};

// publication.c
const char *meeting_folder(void);
struct publication *own_publication(void);
struct publication *peer_publication(uint32_t pid);
void lock_shared(pthread_mutex_t *lock);
struct region *find_region(struct publication *owner, uint32_t key);
struct ibv_mr *register_region(struct ibv_pd *pd, void *address, size_t bytes, int access);
int deregister_region(struct ibv_mr *mr);
// Held while the local memory of a region is written, so that none is removed meanwhile.
void hold_regions(void);
void release_regions(void);

// completion.c
void push_completion(struct cq *cq, const struct ibv_wc *wc, uint32_t frees);
int poll_completions(struct ibv_cq *cq, int count, struct ibv_wc *wc);
int arm(struct ibv_cq *cq, int solicited_only);
void ring_peer(uint32_t pid, uint32_t channel, uint32_t cq);
void free_entries(uint32_t qp_number, uint32_t count);

// work.c
int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int post_receive(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
// Ends what a queue pair has posted: nothing of it writes any memory when this returns.
void flush(struct qp *qp);
void stop_device(struct device *device);

// faults.c
enum { NO_FAULT = -1 };
void count_post(void);
void count_work(uint64_t bytes);
int fault_of_post(void);
int fault_of_region(void);
// Whether the region being registered is not to be written by peers, whatever was asked for.
bool is_read_only(void);
// Whether the device is to say, with this request, that it has failed as a whole.
bool device_fails(void);
// A completion status to give instead of carrying the request out, or NO_FAULT.
int fault_of_work(enum ibv_wr_opcode opcode);
void hold_back(uint64_t bytes);
bool reorders(void);

uint64_t now_ns(void);

#endif
