// Completion queues and their channels. A channel is a datagram socket, so that a sender in
// another process can ring it.

#define _GNU_SOURCE
#include "double.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { QUEUES_MAX = 1 << 12 };

static pthread_mutex_t queues_lock = PTHREAD_MUTEX_INITIALIZER;
static struct cq *queues[QUEUES_MAX];
static _Atomic uint32_t next_channel = 1;

static socklen_t address_of(uint32_t pid, uint32_t channel, struct sockaddr_un *out) {
  memset(out, 0, sizeof *out);
  out->sun_family = AF_UNIX;
  int bytes = snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "hkv_verbs_%u_%u", pid, channel);
  return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)bytes);
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
  struct channel *channel = calloc(1, sizeof *channel);
  struct sockaddr_un address;
  if (channel == NULL) return NULL;
  channel->id = atomic_fetch_add(&next_channel, 1);
  channel->base.context = context;
  channel->base.fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  socklen_t bytes = address_of((uint32_t)getpid(), channel->id, &address);
  if (channel->base.fd < 0 || bind(channel->base.fd, (struct sockaddr *)&address, bytes) != 0) {
    if (channel->base.fd >= 0) close(channel->base.fd);
    free(channel);
    return NULL;
  }
  return &channel->base;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *base) {
  if (base->refcnt > 0) return EBUSY;
  close(base->fd);
  free(base);
  return 0;
}

// A bell that is full has been rung often enough.
void ring_peer(uint32_t pid, uint32_t channel, uint32_t cq) {
  static _Atomic int bell = -1;
  struct sockaddr_un address;
  if (channel == 0) return;
  int fd = atomic_load(&bell);
  if (fd < 0) {
    int fresh = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (!atomic_compare_exchange_strong(&bell, &fd, fresh)) close(fresh);
    else fd = fresh;
  }
  socklen_t bytes = address_of(pid, channel, &address);
  sendto(fd, &cq, sizeof cq, MSG_DONTWAIT, (struct sockaddr *)&address, bytes);
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
                             struct ibv_comp_channel *channel, int vector) {
  (void)vector;
  if (cqe < 1 || cqe > CQE_MAX) {
    errno = EINVAL;
    return NULL;
  }
  struct cq *cq = calloc(1, sizeof *cq);
  struct completion *ring = calloc((size_t)cqe, sizeof *ring);
  pthread_mutex_lock(&queues_lock);
  uint32_t id = 1;
  while (id < QUEUES_MAX && queues[id] != NULL) id++;
  if (cq == NULL || ring == NULL || id == QUEUES_MAX) {
    pthread_mutex_unlock(&queues_lock);
    free(cq);
    free(ring);
    errno = ENOMEM;
    return NULL;
  }
  queues[id] = cq;
  pthread_mutex_unlock(&queues_lock);
  pthread_mutex_init(&cq->lock, NULL);
  cq->id = id;
  cq->ring = ring;
  cq->capacity = (uint32_t)cqe;
  cq->base.context = context;
  cq->base.channel = channel;
  cq->base.cq_context = cq_context;
  cq->base.cqe = cqe;
  if (channel != NULL) channel->refcnt++;
  return &cq->base;
}

int ibv_destroy_cq(struct ibv_cq *base) {
  struct cq *cq = (struct cq *)base;
  if (cq->receivers != NULL) return EBUSY;
  pthread_mutex_lock(&queues_lock);
  queues[cq->id] = NULL;
  pthread_mutex_unlock(&queues_lock);
  if (base->channel != NULL) base->channel->refcnt--;
  free(cq->ring);
  free(cq);
  return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context) {
  uint32_t id = 0;
  for (;;) {
    ssize_t bytes = recv(channel->fd, &id, sizeof id, 0);
    if (bytes < 0) return -1;
    pthread_mutex_lock(&queues_lock);
    struct cq *found = bytes == sizeof id && id < QUEUES_MAX ? queues[id] : NULL;
    pthread_mutex_unlock(&queues_lock);
    if (found == NULL) continue;
    *cq = &found->base;
    *cq_context = found->base.cq_context;
    return 0;
  }
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count) {
  (void)cq;
  (void)count;
}

void push_completion(struct cq *cq, const struct ibv_wc *wc, uint32_t frees) {
  pthread_mutex_lock(&cq->lock);
  bool overrun = cq->count == cq->capacity;
  if (!overrun) {
    struct completion *entry = &cq->ring[(cq->head + cq->count++) % cq->capacity];
    entry->wc = *wc;
    entry->frees = frees;
  }
  bool ring = cq->armed == 1 || (cq->armed == 2 && wc->status != IBV_WC_SUCCESS);
  if (ring) cq->armed = 0;
  pthread_mutex_unlock(&cq->lock);
  if (overrun) {
    // What a real queue does with a program that posted more than it polls for.
    struct ibv_async_event event = {.event_type = IBV_EVENT_CQ_ERR, .element.cq = &cq->base};
    struct device *device = (struct device *)cq->base.context;
    if (write(device->async_write, &event, sizeof event) < 0) abort();
  }
  if (ring && cq->base.channel != NULL)
    ring_peer((uint32_t)getpid(), ((struct channel *)cq->base.channel)->id, cq->id);
}

static int poll_received(struct cq *cq, int count, struct ibv_wc *wc) {
  int got = 0;
  for (struct qp *qp = cq->receivers; qp != NULL && got < count; qp = qp->next_receiver) {
    struct published_qp *published = qp->published;
    if (published->received_head == published->received_tail) continue;
    lock_shared(&published->lock);
    while (got < count && published->received_head != published->received_tail) {
      const struct received *entry = &published->received[published->received_head++ % RECEIVES_MAX];
      memset(&wc[got], 0, sizeof wc[got]);
      wc[got].wr_id = entry->wr_id;
      wc[got].opcode = entry->opcode;
      wc[got].byte_len = entry->bytes;
      wc[got].imm_data = entry->imm;
      wc[got].wc_flags = entry->flags;
      wc[got].qp_num = qp->base.qp_num;
      got++;
    }
    pthread_mutex_unlock(&published->lock);
  }
  return got;
}

int poll_completions(struct ibv_cq *base, int count, struct ibv_wc *wc) {
  struct cq *cq = (struct cq *)base;
  int got = 0;
  uint32_t frees[64];
  if (count > 64) count = 64;
  pthread_mutex_lock(&cq->lock);
  while (got < count && cq->count > 0) {
    wc[got] = cq->ring[cq->head].wc;
    frees[got] = cq->ring[cq->head].frees;
    cq->head = (cq->head + 1) % cq->capacity;
    cq->count--;
    got++;
  }
  int received = poll_received(cq, count - got, wc + got);
  pthread_mutex_unlock(&cq->lock);
  for (int i = 0; i < got; i++) free_entries(wc[i].qp_num, frees[i]);
  return got + received;
}

int arm(struct ibv_cq *base, int solicited_only) {
  struct cq *cq = (struct cq *)base;
  pthread_mutex_lock(&cq->lock);
  cq->armed = solicited_only ? 2 : 1;
  for (struct qp *qp = cq->receivers; qp != NULL; qp = qp->next_receiver) {
    lock_shared(&qp->published->lock);
    qp->published->armed = (uint32_t)cq->armed;
    pthread_mutex_unlock(&qp->published->lock);
  }
  pthread_mutex_unlock(&cq->lock);
  return 0;
}
