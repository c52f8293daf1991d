// Posting, and the thread of a device that carries out what was posted, in order per queue pair.

#define _GNU_SOURCE
#include "double.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

// Between two looks for a receive that is not posted yet.
static const uint64_t RNR_PAUSE_NS = 1000000;
// Between two tries to reach a peer that is not connected yet.
static const uint64_t RETRY_PAUSE_NS = 1000000;
enum { RETRIES = 7 };

// What became of one look at a request.
enum { AGAIN = -2 };

static bool covers(uint64_t address, uint64_t bytes, uint64_t first, uint64_t wanted) {
  return first >= address && wanted <= bytes && first - address <= bytes - wanted;
}

// Whether a region of this process lets `sge` be used.
static bool may_use(const struct ibv_sge *sge, uint64_t domain, bool write) {
  struct region *region = find_region(own_publication(), sge->lkey);
  return region != NULL && region->domain == domain &&
         covers(region->address, region->bytes, sge->addr, sge->length) &&
         (!write || (region->access & IBV_ACCESS_LOCAL_WRITE));
}

static uint64_t length_of(const struct request *request) {
  uint64_t bytes = 0;
  for (int i = 0; i < request->wr.num_sge; i++) bytes += request->sge[i].length;
  return bytes;
}

// The peer's end, while it is connected to this one; NULL otherwise.
static struct published_qp *peer_end(struct qp *qp, struct publication **owner) {
  uint32_t pid = qp->published->peer_pid, number = qp->published->peer_number;
  *owner = peer_publication(pid);
  if (*owner == NULL) return NULL;
  for (int i = 0; i < QUEUE_PAIRS_MAX; i++) {
    struct published_qp *end = &(*owner)->qps[i];
    if (atomic_load(&end->number) != number) continue;
    bool ready = end->state == IBV_QPS_RTR || end->state == IBV_QPS_RTS;
    bool mine = end->peer_pid == (uint32_t)getpid() && end->peer_number == qp->base.qp_num;
    return ready && mine ? end : NULL;
  }
  return NULL;
}

static bool still_sends(struct qp *qp) { return qp->published->state == IBV_QPS_RTS; }

// Moves one piece between local and remote memory, a chunk at a time; a completion status.
static int move(struct qp *qp, struct publication *owner, uint32_t key, uint64_t remote,
                const struct ibv_sge *sge, bool read) {
  uint64_t domain = qp->published->domain;
  for (uint64_t done = 0; done < sge->length;) {
    uint64_t bytes = sge->length - done;
    if (bytes > CHUNK_BYTES) bytes = CHUNK_BYTES;
    hold_back(bytes);
    // From here on no region of this process is removed, and none of the peer's while it is
    // written to.
    hold_regions();
    if (!read) lock_shared(&owner->gate);
    int status = IBV_WC_SUCCESS;
    struct region *region = find_region(owner, key);
    if (!still_sends(qp)) status = IBV_WC_WR_FLUSH_ERR;
    else if (!may_use(sge, domain, read)) status = IBV_WC_LOC_PROT_ERR;
    else if (region == NULL || !covers(region->address, region->bytes, remote + done, bytes))
      status = IBV_WC_REM_ACCESS_ERR;
    if (status == IBV_WC_SUCCESS) {
      struct iovec local = {(void *)(uintptr_t)(sge->addr + done), bytes};
      struct iovec there = {(void *)(uintptr_t)(remote + done), bytes};
      pid_t pid = (pid_t)owner->pid;
      ssize_t moved = read ? process_vm_readv(pid, &local, 1, &there, 1, 0)
                           : process_vm_writev(pid, &local, 1, &there, 1, 0);
      if (moved < 0) status = errno == ESRCH ? IBV_WC_RETRY_EXC_ERR : IBV_WC_REM_ACCESS_ERR;
      else bytes = (uint64_t)moved;
    }
    if (!read) pthread_mutex_unlock(&owner->gate);
    release_regions();
    if (status != IBV_WC_SUCCESS) return status;
    count_work(bytes);
    done += bytes;
  }
  return IBV_WC_SUCCESS;
}

static int carry_one_sided(struct qp *qp, struct request *request, struct publication *owner,
                           struct published_qp *end) {
  bool read = request->wr.opcode == IBV_WR_RDMA_READ;
  uint32_t key = request->wr.wr.rdma.rkey;
  uint64_t remote = request->wr.wr.rdma.remote_addr, bytes = length_of(request);
  uint32_t right = read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
  struct region *region = find_region(owner, key);
  if (bytes > 0 && (region == NULL || region->domain != end->domain ||
                    !covers(region->address, region->bytes, remote, bytes) ||
                    !(region->access & right) || !(end->access & right))) {
    // A responder that refuses goes to its error state too.
    end->state = IBV_QPS_ERR;
    return IBV_WC_REM_ACCESS_ERR;
  }
  for (int i = 0; i < request->wr.num_sge; i++) {
    if (!(request->wr.send_flags & IBV_SEND_INLINE) &&
        !may_use(&request->sge[i], qp->published->domain, read))
      return IBV_WC_LOC_PROT_ERR;
  }
  for (int i = 0; i < request->wr.num_sge; i++) {
    const struct ibv_sge *sge = &request->sge[i];
    if (request->wr.send_flags & IBV_SEND_INLINE) {
      struct iovec local = {(void *)(uintptr_t)sge->addr, sge->length};
      struct iovec there = {(void *)(uintptr_t)remote, sge->length};
      if (process_vm_writev((pid_t)owner->pid, &local, 1, &there, 1, 0) < 0)
        return errno == ESRCH ? IBV_WC_RETRY_EXC_ERR : IBV_WC_REM_ACCESS_ERR;
    } else {
      int status = move(qp, owner, key, remote, sge, read);
      if (status != IBV_WC_SUCCESS) return status;
    }
    remote += sge->length;
  }
  return IBV_WC_SUCCESS;
}

// Uses up a receive of the peer: with the payload of a send, without any for a write that carries
// an immediate.
static int deliver(struct request *request, struct publication *owner, struct published_qp *end,
                   bool with_payload) {
  uint8_t *payload = NULL;
  uint64_t bytes = length_of(request), filled = 0;
  int status = IBV_WC_SUCCESS;
  lock_shared(&end->lock);
  if (end->receive_head == end->receive_tail) {
    pthread_mutex_unlock(&end->lock);
    return AGAIN;
  }
  const struct receive *receive = &end->receives[end->receive_head++ % RECEIVES_MAX];
  if (with_payload) {
    payload = malloc(bytes ? bytes : 1);
    if (payload == NULL) abort();
    for (int i = 0, at = 0; i < request->wr.num_sge; at += (int)request->sge[i++].length)
      memcpy(payload + at, (void *)(uintptr_t)request->sge[i].addr, request->sge[i].length);
    for (int i = 0; i < receive->num_sge && filled < bytes; i++) {
      uint64_t part = bytes - filled < receive->sge[i].length ? bytes - filled : receive->sge[i].length;
      struct region *region = find_region(owner, receive->sge[i].lkey);
      struct iovec local = {payload + filled, part};
      struct iovec there = {(void *)(uintptr_t)receive->sge[i].addr, part};
      if (region == NULL || !covers(region->address, region->bytes, receive->sge[i].addr, part) ||
          process_vm_writev((pid_t)owner->pid, &local, 1, &there, 1, 0) != (ssize_t)part)
        break;
      filled += part;
    }
    if (filled < bytes) status = IBV_WC_REM_INV_REQ_ERR;
    free(payload);
  }
  if (status == IBV_WC_SUCCESS) {
    bool imm = request->wr.opcode == IBV_WR_SEND_WITH_IMM ||
               request->wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
    end->received[end->received_tail++ % RECEIVES_MAX] = (struct received){
        .wr_id = receive->wr_id,
        .bytes = (uint32_t)bytes,
        .imm = request->wr.imm_data,
        .flags = imm ? IBV_WC_WITH_IMM : 0,
        .opcode = with_payload ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM,
    };
  }
  bool solicited = request->wr.send_flags & IBV_SEND_SOLICITED;
  bool ring = end->armed == 1 || (end->armed == 2 && solicited);
  if (ring) end->armed = 0;
  uint32_t channel = end->channel, cq = end->cq;
  pthread_mutex_unlock(&end->lock);
  if (ring) ring_peer(owner->pid, channel, cq);
  return status;
}

static int carry_out(struct qp *qp, struct request *request) {
  if (device_fails()) {
    struct ibv_async_event event = {.event_type = IBV_EVENT_DEVICE_FATAL};
    struct device *device = (struct device *)qp->base.context;
    if (write(device->async_write, &event, sizeof event) < 0) abort();
  }
  int fault = fault_of_work(request->wr.opcode);
  if (fault != NO_FAULT) return fault;
  struct publication *owner;
  struct published_qp *end = peer_end(qp, &owner);
  if (end == NULL) return IBV_WC_RETRY_EXC_ERR;
  if (length_of(request) > MESSAGE_BYTES_MAX) return IBV_WC_LOC_LEN_ERR;
  switch (request->wr.opcode) {
    case IBV_WR_RDMA_READ:
    case IBV_WR_RDMA_WRITE:
      return carry_one_sided(qp, request, owner, end);
    case IBV_WR_RDMA_WRITE_WITH_IMM: {
      if (end->receive_head == end->receive_tail) return AGAIN;
      int status = carry_one_sided(qp, request, owner, end);
      return status == IBV_WC_SUCCESS ? deliver(request, owner, end, false) : status;
    }
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
      for (int i = 0; i < request->wr.num_sge; i++)
        if (!(request->wr.send_flags & IBV_SEND_INLINE) &&
            !may_use(&request->sge[i], qp->published->domain, false))
          return IBV_WC_LOC_PROT_ERR;
      return deliver(request, owner, end, true);
    default:
      return IBV_WC_LOC_QP_OP_ERR;
  }
}

static enum ibv_wc_opcode opcode_of(const struct request *request) {
  switch (request->wr.opcode) {
    case IBV_WR_RDMA_READ: return IBV_WC_RDMA_READ;
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM: return IBV_WC_RDMA_WRITE;
    default: return IBV_WC_SEND;
  }
}

// Completes a request that is off its queue. The device's lock is held.
static void complete(struct qp *qp, struct request *request, int status) {
  qp->unreported++;
  bool told = status != IBV_WC_SUCCESS || qp->signal_all ||
              (request->wr.send_flags & IBV_SEND_SIGNALED);
  if (told) {
    struct ibv_wc wc = {
        .wr_id = request->wr.wr_id,
        .status = (enum ibv_wc_status)status,
        .opcode = opcode_of(request),
        .qp_num = qp->base.qp_num,
        .byte_len = (uint32_t)length_of(request),
    };
    push_completion((struct cq *)qp->base.send_cq, &wc, qp->unreported);
    qp->unreported = 0;
  }
  free(request);
}

static void flush_locked(struct qp *qp) {
  while (qp->first != NULL) {
    struct request *request = qp->first;
    qp->first = request->next;
    complete(qp, request, IBV_WC_WR_FLUSH_ERR);
  }
  qp->last = NULL;
}

static void enqueue(struct device *device, struct qp *qp) {
  if (qp->queued || qp->busy || qp->first == NULL) return;
  qp->queued = true;
  qp->next_queued = NULL;
  if (device->last != NULL && reorders()) {
    qp->next_queued = device->first;
    device->first = qp;
  } else if (device->last != NULL) {
    device->last->next_queued = qp;
    device->last = qp;
  } else {
    device->first = device->last = qp;
  }
}

static void dequeue(struct device *device, struct qp *qp) {
  struct qp *before = NULL;
  for (struct qp *at = device->first; at != NULL; before = at, at = at->next_queued) {
    if (at != qp) continue;
    if (before != NULL) before->next_queued = qp->next_queued;
    else device->first = qp->next_queued;
    if (device->last == qp) device->last = before;
    break;
  }
  qp->queued = false;
}

// The queue pair to serve next, or NULL with the time at which one may be ready.
static struct qp *next_ready(struct device *device, uint64_t *wake_ns) {
  uint64_t now = now_ns();
  *wake_ns = now + 1000000000u;
  for (struct qp *qp = device->first; qp != NULL; qp = qp->next_queued) {
    if (qp->not_before_ns <= now) return qp;
    if (qp->not_before_ns < *wake_ns) *wake_ns = qp->not_before_ns;
  }
  return NULL;
}

static void serve(struct device *device, struct qp *qp) {
  struct request *request = qp->first;
  qp->busy = true;
  pthread_mutex_unlock(&device->lock);
  int status = carry_out(qp, request);
  pthread_mutex_lock(&device->lock);
  qp->busy = false;
  if (status == AGAIN && still_sends(qp)) {
    // 7 stands for "for ever".
    if (qp->attr.rnr_retry == 7 || qp->rnr_tries++ < qp->attr.rnr_retry) {
      qp->not_before_ns = now_ns() + RNR_PAUSE_NS;
      pthread_cond_broadcast(&device->changed);
      enqueue(device, qp);
      return;
    }
    status = IBV_WC_RNR_RETRY_EXC_ERR;
  } else if (status == AGAIN) {
    status = IBV_WC_WR_FLUSH_ERR;
  }
  if (status == IBV_WC_RETRY_EXC_ERR && qp->rnr_tries++ < RETRIES && still_sends(qp)) {
    qp->not_before_ns = now_ns() + RETRY_PAUSE_NS;
    pthread_cond_broadcast(&device->changed);
    enqueue(device, qp);
    return;
  }
  qp->rnr_tries = 0;
  qp->first = request->next;
  if (qp->first == NULL) qp->last = NULL;
  if (status != IBV_WC_SUCCESS) qp->published->state = IBV_QPS_ERR;
  complete(qp, request, status);
  if (qp->published->state == IBV_QPS_ERR) flush_locked(qp);
  pthread_cond_broadcast(&device->changed);
  enqueue(device, qp);
}

static void *run(void *argument) {
  struct device *device = argument;
  pthread_mutex_lock(&device->lock);
  while (!device->stopping) {
    uint64_t wake_ns;
    struct qp *qp = next_ready(device, &wake_ns);
    if (qp != NULL) {
      dequeue(device, qp);
      serve(device, qp);
    } else if (device->first != NULL) {
      struct timespec until = {(time_t)(wake_ns / 1000000000u), (long)(wake_ns % 1000000000u)};
      pthread_cond_timedwait(&device->changed, &device->lock, &until);
    } else {
      pthread_cond_wait(&device->changed, &device->lock);
    }
  }
  pthread_mutex_unlock(&device->lock);
  return NULL;
}

void stop_device(struct device *device) {
  pthread_mutex_lock(&device->lock);
  device->stopping = true;
  pthread_cond_broadcast(&device->changed);
  pthread_mutex_unlock(&device->lock);
  if (device->started) pthread_join(device->thread, NULL);
}

void flush(struct qp *qp) {
  struct device *device = (struct device *)qp->base.context;
  pthread_mutex_lock(&device->lock);
  while (qp->busy) pthread_cond_wait(&device->changed, &device->lock);
  if (qp->queued) dequeue(device, qp);
  flush_locked(qp);
  pthread_mutex_unlock(&device->lock);
}

// Copies a request; 0 or an error number.
static int take(struct qp *qp, const struct ibv_send_wr *wr, struct request **out) {
  if (wr->num_sge < 0 || wr->num_sge > SGE_MAX || (uint32_t)wr->num_sge > qp->cap.max_send_sge)
    return EINVAL;
  int fault = fault_of_post();
  if (fault != NO_FAULT) return fault;
  if (qp->outstanding == qp->cap.max_send_wr) return ENOMEM;
  struct request *request = calloc(1, sizeof *request);
  if (request == NULL) return ENOMEM;
  request->wr = *wr;
  request->wr.next = NULL;
  memcpy(request->sge, wr->sg_list, sizeof *wr->sg_list * (size_t)wr->num_sge);
  if (wr->send_flags & IBV_SEND_INLINE) {
    uint64_t at = 0;
    if (wr->opcode == IBV_WR_RDMA_READ || length_of(request) > INLINE_BYTES_MAX) {
      free(request);
      return EINVAL;
    }
    for (int i = 0; i < wr->num_sge; at += request->sge[i++].length) {
      memcpy(request->inline_data + at, (void *)(uintptr_t)request->sge[i].addr, request->sge[i].length);
      request->sge[i].addr = (uint64_t)(uintptr_t)(request->inline_data + at);
    }
  }
  *out = request;
  return 0;
}

int post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
  struct qp *qp = (struct qp *)base;
  struct device *device = (struct device *)base->context;
  int result = 0;
  count_post();
  pthread_mutex_lock(&device->lock);
  if (!device->started) {
    device->started = pthread_create(&device->thread, NULL, run, device) == 0;
    if (!device->started) result = EAGAIN;
  }
  for (; result == 0 && wr != NULL; wr = wr->next) {
    struct request *request = NULL;
    uint32_t state = qp->published->state;
    if (state != IBV_QPS_RTS && state != IBV_QPS_ERR) result = EINVAL;
    else result = take(qp, wr, &request);
    if (result != 0) break;
    qp->outstanding++;
    if (state == IBV_QPS_ERR) {
      complete(qp, request, IBV_WC_WR_FLUSH_ERR);
      continue;
    }
    if (qp->last != NULL) qp->last->next = request;
    else qp->first = request;
    qp->last = request;
  }
  if (result != 0 && bad != NULL) *bad = wr;
  enqueue(device, qp);
  pthread_cond_broadcast(&device->changed);
  pthread_mutex_unlock(&device->lock);
  return result;
}

int post_receive(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
  struct qp *qp = (struct qp *)base;
  struct published_qp *published = qp->published;
  int result = 0;
  lock_shared(&published->lock);
  for (; wr != NULL; wr = wr->next) {
    uint32_t used = published->receive_tail - published->receive_head +
                    (published->received_tail - published->received_head);
    if (published->state == IBV_QPS_RESET) result = EINVAL;
    else if (wr->num_sge < 0 || wr->num_sge > 4) result = EINVAL;
    else if (used >= RECEIVES_MAX || used >= qp->cap.max_recv_wr) result = ENOMEM;
    if (result != 0) break;
    struct receive *receive = &published->receives[published->receive_tail++ % RECEIVES_MAX];
    receive->wr_id = wr->wr_id;
    receive->num_sge = wr->num_sge;
    memcpy(receive->sge, wr->sg_list, sizeof *wr->sg_list * (size_t)wr->num_sge);
  }
  pthread_mutex_unlock(&published->lock);
  if (result != 0 && bad != NULL) *bad = wr;
  return result;
}
