// The calls of libibverbs that a program makes by name.

#define _GNU_SOURCE
#include "double.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// The inline functions of the headers take these names as macros.
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static struct qp *qps[QUEUE_PAIRS_MAX];
static _Atomic uint64_t next_domain = 1;

static struct ibv_device the_device = {
    .node_type = IBV_NODE_CA,
    .transport_type = IBV_TRANSPORT_IB,
    .name = "double0",
    .dev_name = "uverbs0",
    .dev_path = "/sys/class/infiniband_verbs/uverbs0",
};

// Readers of topology look for a PCI address in a path that exists.
static void make_device(void) {
  snprintf(the_device.ibdev_path, sizeof the_device.ibdev_path, "%s/0000:01:00.0", meeting_folder());
  mkdir(the_device.ibdev_path, 0700);
}

struct ibv_device **ibv_get_device_list(int *count) {
  static pthread_once_t made = PTHREAD_ONCE_INIT;
  // HKV_VERBS_DEVICES=0: a machine whose library is there and whose hardware is not.
  const char *wanted = getenv("HKV_VERBS_DEVICES");
  bool none = wanted != NULL && strcmp(wanted, "0") == 0;
  struct ibv_device **list = calloc(2, sizeof *list);
  if (list == NULL) return NULL;
  pthread_once(&made, make_device);
  if (!none) list[0] = &the_device;
  if (count != NULL) *count = none ? 0 : 1;
  return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }

const char *ibv_get_device_name(struct ibv_device *device) { return device->name; }

__be64 ibv_get_device_guid(struct ibv_device *device) {
  (void)device;
  return htobe64(0x0200000000000001u);
}

const char *ibv_node_type_str(enum ibv_node_type type) { return type == IBV_NODE_CA ? "InfiniBand channel adapter" : "unknown"; }

const char *ibv_port_state_str(enum ibv_port_state state) { return state == IBV_PORT_ACTIVE ? "active" : "down"; }

const char *ibv_event_type_str(enum ibv_event_type event) {
  return event == IBV_EVENT_CQ_ERR ? "CQ error" : event == IBV_EVENT_DEVICE_FATAL ? "local catastrophic error" : "event";
}

const char *ibv_wc_status_str(enum ibv_wc_status status) {
  static const char *const texts[] = {
      [IBV_WC_SUCCESS] = "success",
      [IBV_WC_LOC_LEN_ERR] = "local length error",
      [IBV_WC_LOC_QP_OP_ERR] = "local QP operation error",
      [IBV_WC_LOC_PROT_ERR] = "local protection error",
      [IBV_WC_WR_FLUSH_ERR] = "Work Request Flushed Error",
      [IBV_WC_REM_INV_REQ_ERR] = "remote invalid request error",
      [IBV_WC_REM_ACCESS_ERR] = "remote access error",
      [IBV_WC_RETRY_EXC_ERR] = "transport retry counter exceeded",
      [IBV_WC_RNR_RETRY_EXC_ERR] = "RNR retry counter exceeded",
      [IBV_WC_FATAL_ERR] = "fatal error",
  };
  bool known = (size_t)status < sizeof texts / sizeof *texts && texts[status] != NULL;
  return known ? texts[status] : "unknown";
}

int ibv_fork_init(void) { return 0; }

struct ibv_context *ibv_open_device(struct ibv_device *device) {
  if (own_publication() == NULL) return NULL;
  struct device *opened = calloc(1, sizeof *opened);
  int events[2];
  if (opened == NULL || pipe2(events, O_CLOEXEC) != 0) {
    free(opened);
    return NULL;
  }
  pthread_condattr_t clock;
  pthread_condattr_init(&clock);
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  pthread_cond_init(&opened->changed, &clock);
  pthread_condattr_destroy(&clock);
  pthread_mutex_init(&opened->lock, NULL);
  opened->async_write = events[1];
  opened->base.device = device;
  opened->base.async_fd = events[0];
  opened->base.cmd_fd = -1;
  opened->base.num_comp_vectors = 1;
  opened->base.ops.poll_cq = poll_completions;
  opened->base.ops.req_notify_cq = arm;
  opened->base.ops.post_send = post_send;
  opened->base.ops.post_recv = post_receive;
  // Without the extended table the headers call the functions of this library by name.
  opened->base.abi_compat = NULL;
  return &opened->base;
}

int ibv_close_device(struct ibv_context *context) {
  struct device *device = (struct device *)context;
  stop_device(device);
  close(device->base.async_fd);
  close(device->async_write);
  free(device);
  return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr) {
  (void)context;
  *attr = (struct ibv_device_attr){
      .fw_ver = "double",
      .max_mr_size = UINT64_MAX,
      .page_size_cap = 0xfffff000,
      .vendor_id = 0xd0b1e,
      .max_qp = QUEUE_PAIRS_MAX,
      .max_qp_wr = SEND_REQUESTS_MAX,
      .max_sge = SGE_MAX,
      .max_sge_rd = SGE_MAX,
      .max_cq = 1 << 12,
      .max_cqe = CQE_MAX,
      .max_mr = REGIONS_MAX - 1,
      .max_pd = 1 << 16,
      .max_qp_rd_atom = 16,
      .max_qp_init_rd_atom = 16,
      .max_res_rd_atom = 16 * QUEUE_PAIRS_MAX,
      .max_pkeys = 1,
      .phys_port_cnt = 1,
  };
  return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *out) {
  (void)context;
  if (port != 1) return EINVAL;
  const char *state = getenv("HKV_VERBS_PORT");
  struct ibv_port_attr attr = {
      .state = state != NULL && strcmp(state, "down") == 0 ? IBV_PORT_DOWN : IBV_PORT_ACTIVE,
      .max_mtu = IBV_MTU_4096,
      .active_mtu = IBV_MTU_4096,
      .gid_tbl_len = GIDS,
      .max_msg_sz = MESSAGE_BYTES_MAX,
      .pkey_tbl_len = 1,
      .active_width = 2,
      .active_speed = 32,
      .phys_state = 5,
      .link_layer = IBV_LINK_LAYER_ETHERNET,
  };
  // Callers by the old name have room up to here only.
  memcpy(out, &attr, offsetof(struct ibv_port_attr, port_cap_flags2));
  return 0;
}

// Even indices are link-local addresses, odd ones IPv4 addresses; all carry the pid.
int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) {
  (void)context;
  if (port != 1 || index < 0 || index >= GIDS) return errno = EINVAL, -1;
  uint32_t pid = htonl((uint32_t)getpid());
  memset(gid, 0, sizeof *gid);
  if (index % 2 == 1) {
    gid->raw[10] = gid->raw[11] = 0xff;
  } else {
    gid->raw[0] = 0xfe;
    gid->raw[1] = 0x80;
  }
  memcpy(gid->raw + 12, &pid, sizeof pid);
  return 0;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index,
                      struct ibv_gid_entry *entry, uint32_t flags, size_t bytes) {
  (void)flags;
  if (bytes < sizeof *entry || port != 1 || index >= GIDS) return EINVAL;
  memset(entry, 0, bytes);
  entry->gid_index = index;
  entry->port_num = port;
  entry->gid_type = IBV_GID_TYPE_ROCE_V2;
  return ibv_query_gid(context, (uint8_t)port, (int)index, &entry->gid) == 0 ? 0 : EINVAL;
}

ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries,
                             size_t most, uint32_t flags, size_t bytes) {
  size_t count = most < GIDS ? most : GIDS;
  for (size_t i = 0; i < count; i++) {
    int result = _ibv_query_gid_ex(context, 1, (uint32_t)i, &entries[i], flags, bytes);
    if (result != 0) return -result;
  }
  return (ssize_t)count;
}

int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey) {
  (void)context;
  if (port != 1 || index != 0) return -1;
  *pkey = 0xffff;
  return 0;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
  return read(context->async_fd, event, sizeof *event) == sizeof *event ? 0 : -1;
}

void ibv_ack_async_event(struct ibv_async_event *event) { (void)event; }

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
  struct domain *domain = calloc(1, sizeof *domain);
  if (domain == NULL) return NULL;
  domain->base.context = context;
  domain->id = atomic_fetch_add(&next_domain, 1);
  return &domain->base;
}

int ibv_dealloc_pd(struct ibv_pd *pd) {
  struct publication *own = own_publication();
  uint64_t id = ((struct domain *)pd)->id;
  for (int i = 0; i < REGIONS_MAX; i++)
    if (atomic_load(&own->regions[i].key) != 0 && own->regions[i].domain == id) return EBUSY;
  free(pd);
  return 0;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t bytes, int access) {
  return register_region(pd, address, bytes, access);
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t bytes, uint64_t iova,
                                unsigned int access) {
  if (iova != (uint64_t)(uintptr_t)address) return errno = EOPNOTSUPP, NULL;
  return register_region(pd, address, bytes, (int)access);
}

int ibv_dereg_mr(struct ibv_mr *mr) { return deregister_region(mr); }

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr) {
  (void)pd;
  (void)attr;
  return errno = EOPNOTSUPP, NULL;
}

int ibv_destroy_srq(struct ibv_srq *srq) {
  (void)srq;
  return EINVAL;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
  struct publication *own = own_publication();
  if (attr->qp_type != IBV_QPT_RC || attr->srq != NULL) return errno = EOPNOTSUPP, NULL;
  if (attr->cap.max_send_wr > SEND_REQUESTS_MAX || attr->cap.max_recv_wr > SEND_REQUESTS_MAX ||
      attr->cap.max_send_sge > SGE_MAX || attr->cap.max_recv_sge > SGE_MAX ||
      attr->cap.max_inline_data > INLINE_BYTES_MAX)
    return errno = EINVAL, NULL;
  struct qp *qp = calloc(1, sizeof *qp);
  if (qp == NULL) return NULL;
  static uint32_t generation;
  pthread_mutex_lock(&table_lock);
  uint32_t index = 0;
  while (index < QUEUE_PAIRS_MAX && qps[index] != NULL) index++;
  if (index == QUEUE_PAIRS_MAX) {
    pthread_mutex_unlock(&table_lock);
    free(qp);
    return errno = ENOMEM, NULL;
  }
  qps[index] = qp;
  uint32_t number = (++generation % 0x3fff) * QUEUE_PAIRS_MAX + index + 1;
  pthread_mutex_unlock(&table_lock);

  struct published_qp *published = &own->qps[index];
  struct cq *receive_cq = (struct cq *)attr->recv_cq;
  qp->base.context = pd->context;
  qp->base.qp_context = attr->qp_context;
  qp->base.pd = pd;
  qp->base.send_cq = attr->send_cq;
  qp->base.recv_cq = attr->recv_cq;
  qp->base.qp_num = number;
  qp->base.qp_type = attr->qp_type;
  qp->published = published;
  qp->index = index;
  qp->cap = attr->cap;
  qp->signal_all = attr->sq_sig_all != 0;
  lock_shared(&published->lock);
  published->state = IBV_QPS_RESET;
  published->domain = ((struct domain *)pd)->id;
  published->receive_head = published->receive_tail = 0;
  published->received_head = published->received_tail = 0;
  published->peer_pid = published->peer_number = 0;
  struct ibv_comp_channel *channel = attr->recv_cq->channel;
  published->channel = channel != NULL ? ((struct channel *)channel)->id : 0;
  published->cq = receive_cq->id;
  published->armed = (uint32_t)receive_cq->armed;
  atomic_store(&published->number, number);
  pthread_mutex_unlock(&published->lock);
  pthread_mutex_lock(&receive_cq->lock);
  qp->next_receiver = receive_cq->receivers;
  receive_cq->receivers = qp;
  pthread_mutex_unlock(&receive_cq->lock);
  return &qp->base;
}

void free_entries(uint32_t number, uint32_t count) {
  pthread_mutex_lock(&table_lock);
  struct qp *qp = qps[(number - 1) % QUEUE_PAIRS_MAX];
  if (qp != NULL && qp->base.qp_num == number) {
    struct device *device = (struct device *)qp->base.context;
    pthread_mutex_lock(&device->lock);
    qp->outstanding -= count;
    pthread_mutex_unlock(&device->lock);
  }
  pthread_mutex_unlock(&table_lock);
}

int ibv_destroy_qp(struct ibv_qp *base) {
  struct qp *qp = (struct qp *)base;
  struct cq *receive_cq = (struct cq *)base->recv_cq;
  qp->published->state = IBV_QPS_ERR;
  flush(qp);
  pthread_mutex_lock(&receive_cq->lock);
  for (struct qp **at = &receive_cq->receivers; *at != NULL; at = &(*at)->next_receiver) {
    if (*at != qp) continue;
    *at = qp->next_receiver;
    break;
  }
  pthread_mutex_unlock(&receive_cq->lock);
  atomic_store(&qp->published->number, 0);
  pthread_mutex_lock(&table_lock);
  qps[qp->index] = NULL;
  pthread_mutex_unlock(&table_lock);
  free(qp);
  return 0;
}

// What each step takes: the state it leads from, and the attributes that have to be there.
static const struct {
  enum ibv_qp_state from, to;
  int needs;
} STEPS[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0},
    {IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
         IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0},
};

static int check_step(enum ibv_qp_state from, enum ibv_qp_state to, int mask) {
  if (to == IBV_QPS_ERR || to == IBV_QPS_RESET) return 0;
  for (size_t i = 0; i < sizeof STEPS / sizeof *STEPS; i++)
    if (STEPS[i].from == from && STEPS[i].to == to)
      return (mask & STEPS[i].needs) == STEPS[i].needs ? 0 : EINVAL;
  return EINVAL;
}

int ibv_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask) {
  struct qp *qp = (struct qp *)base;
  struct published_qp *published = qp->published;
  enum ibv_qp_state from = (enum ibv_qp_state)published->state;
  enum ibv_qp_state to = mask & IBV_QP_STATE ? attr->qp_state : from;
  int result = check_step(from, to, mask);
  if (result != 0) return result;
  lock_shared(&published->lock);
  if (mask & IBV_QP_ACCESS_FLAGS) published->access = (uint32_t)attr->qp_access_flags;
  if (mask & IBV_QP_AV) {
    uint32_t pid;
    memcpy(&pid, attr->ah_attr.grh.dgid.raw + 12, sizeof pid);
    published->peer_pid = ntohl(pid);
    if (!attr->ah_attr.is_global) result = EINVAL;
  }
  if (mask & IBV_QP_DEST_QPN) published->peer_number = attr->dest_qp_num;
  if (mask & IBV_QP_RNR_RETRY) qp->attr.rnr_retry = attr->rnr_retry;
  if (result == 0) published->state = to;
  if (to == IBV_QPS_RESET) published->receive_head = published->receive_tail = 0;
  pthread_mutex_unlock(&published->lock);
  if (result == 0 && (to == IBV_QPS_ERR || to == IBV_QPS_RESET)) flush(qp);
  return result;
}

int ibv_query_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask,
                 struct ibv_qp_init_attr *init) {
  (void)mask;
  struct qp *qp = (struct qp *)base;
  memset(attr, 0, sizeof *attr);
  attr->qp_state = (enum ibv_qp_state)qp->published->state;
  attr->dest_qp_num = qp->published->peer_number;
  attr->cap = qp->cap;
  memset(init, 0, sizeof *init);
  init->send_cq = base->send_cq;
  init->recv_cq = base->recv_cq;
  init->cap = qp->cap;
  init->qp_type = base->qp_type;
  return 0;
}
