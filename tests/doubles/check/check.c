// What the double of libibverbs keeps to, checked from the outside: two processes, a queue pair
// each, brought up as any program does. Prints a line per case; exits with the number of failures.

#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

int hkv_verbs_inject(const char *rules);

enum { BYTES = 1 << 20, DEPTH = 64 };

// What one side tells the other.
struct card {
  union ibv_gid gid;
  uint32_t qp, rkey, read_only, narrowed;
  uint64_t address;
};

struct side {
  struct ibv_context *context;
  struct ibv_pd *pd;
  struct ibv_comp_channel *channel;
  struct ibv_cq *cq;
  struct ibv_qp *qp;
  struct ibv_mr *mr, *read_only;
  uint8_t *memory;
  struct card mine, theirs;
};

static int failures;

static void check(bool right, const char *what) {
  printf("%s %s\n", right ? "ok  " : "FAIL", what);
  fflush(stdout);
  failures += !right;
}

static void need(bool right, const char *what) {
  if (right) return;
  printf("FAIL %s\n", what);
  exit(100);
}

static int access_all(void) {
  return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
}

static void new_qp(struct side *side) {
  struct ibv_qp_init_attr init = {
      .send_cq = side->cq,
      .recv_cq = side->cq,
      .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 4, .max_recv_sge = 2},
      .qp_type = IBV_QPT_RC,
  };
  side->qp = ibv_create_qp(side->pd, &init);
  need(side->qp != NULL, "a queue pair");
  struct ibv_qp_attr attr = {
      .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = (unsigned)access_all()};
  int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
  need(ibv_modify_qp(side->qp, &attr, mask) == 0, "INIT");
  side->mine.qp = side->qp->qp_num;
}

static void open_side(struct side *side) {
  int count;
  struct ibv_device **devices = ibv_get_device_list(&count);
  need(count == 1, "one device");
  side->context = ibv_open_device(devices[0]);
  ibv_free_device_list(devices);
  need(side->context != NULL, "the device opens");
  side->pd = ibv_alloc_pd(side->context);
  side->channel = ibv_create_comp_channel(side->context);
  side->cq = ibv_create_cq(side->context, 4 * DEPTH, NULL, side->channel, 0);
  side->memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  side->mr = ibv_reg_mr(side->pd, side->memory, BYTES, access_all());
  side->read_only = ibv_reg_mr(side->pd, side->memory, 4096, IBV_ACCESS_REMOTE_READ);
  hkv_verbs_inject("rights=readonly");
  struct ibv_mr *narrowed = ibv_reg_mr(side->pd, side->memory, 4096, access_all());
  hkv_verbs_inject("");
  need(side->mr != NULL && side->read_only != NULL && narrowed != NULL, "regions");
  ibv_query_gid(side->context, 1, 1, &side->mine.gid);
  side->mine.rkey = side->mr->rkey;
  side->mine.read_only = side->read_only->rkey;
  side->mine.narrowed = narrowed->rkey;
  side->mine.address = (uint64_t)(uintptr_t)side->memory;
  new_qp(side);
}

static void connect_side(struct side *side, int socket) {
  need(write(socket, &side->mine, sizeof side->mine) == sizeof side->mine, "send the card");
  need(read(socket, &side->theirs, sizeof side->theirs) == sizeof side->theirs, "read the card");
  struct ibv_qp_attr attr = {
      .qp_state = IBV_QPS_RTR,
      .path_mtu = IBV_MTU_1024,
      .dest_qp_num = side->theirs.qp,
      .max_dest_rd_atomic = 1,
      .min_rnr_timer = 1,
      .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = side->theirs.gid, .sgid_index = 1}},
  };
  int rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
            IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
  need(ibv_modify_qp(side->qp, &attr, rtr & ~IBV_QP_RQ_PSN) != 0, "RTR without a sequence number");
  need(ibv_modify_qp(side->qp, &attr, rtr) == 0, "RTR");
  attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 8, .retry_cnt = 1, .rnr_retry = 1,
                              .max_rd_atomic = 1};
  int rts = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
            IBV_QP_MAX_QP_RD_ATOMIC;
  need(ibv_modify_qp(side->qp, &attr, rts) == 0, "RTS");
  // Both are ready before either goes on.
  char byte = 0;
  need(write(socket, &byte, 1) == 1 && read(socket, &byte, 1) == 1, "meet");
}

static struct ibv_wc wait_for(struct side *side) {
  struct ibv_wc wc = {.status = IBV_WC_GENERAL_ERR};
  for (int tries = 0; tries < 10000; tries++) {
    if (ibv_poll_cq(side->cq, 1, &wc) == 1) return wc;
    usleep(1000);
  }
  need(false, "a completion");
  return wc;
}

static int post(struct side *side, enum ibv_wr_opcode opcode, uint32_t lkey, uint64_t local,
                uint32_t rkey, uint64_t remote, uint32_t bytes) {
  struct ibv_sge sge = {local, bytes, lkey};
  struct ibv_send_wr wr = {
      .wr_id = 42, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED,
      .imm_data = 77, .wr.rdma = {remote, rkey}};
  struct ibv_send_wr *bad;
  return ibv_post_send(side->qp, &wr, &bad);
}

static enum ibv_wc_status write_to(struct side *side, uint32_t lkey, uint32_t rkey, uint64_t remote,
                                   uint32_t bytes) {
  need(post(side, IBV_WR_RDMA_WRITE, lkey, side->mine.address, rkey, remote, bytes) == 0,
       "post a write");
  return wait_for(side).status;
}

static enum ibv_wc_status read_from(struct side *side, uint32_t lkey, uint32_t rkey, uint64_t remote,
                                    uint32_t bytes) {
  need(post(side, IBV_WR_RDMA_READ, lkey, side->mine.address + BYTES / 2, rkey, remote, bytes) == 0,
       "post a read");
  return wait_for(side).status;
}

// The peer waits for letters: each asks it for something, and is answered when that is done.
static void serve(struct side *side, int socket) {
  char letter;
  while (read(socket, &letter, 1) == 1) {
    if (letter == 'r') {  // a receive
      struct ibv_sge sge = {side->mine.address + 1000, 64, side->mr->lkey};
      struct ibv_recv_wr wr = {.wr_id = 9, .sg_list = &sge, .num_sge = 1}, *bad;
      need(ibv_post_recv(side->qp, &wr, &bad) == 0, "post a receive");
    } else if (letter == 'c') {  // what came
      struct ibv_wc wc = wait_for(side);
      bool right = wc.wr_id == 9 && wc.qp_num == side->qp->qp_num && wc.byte_len == 64 &&
                   (!(wc.wc_flags & IBV_WC_WITH_IMM) || wc.imm_data == 77);
      letter = right ? (wc.opcode == IBV_WC_RECV ? 's' : 'w') : '?';
    } else if (letter == 'n') {  // a new queue pair
      need(ibv_destroy_qp(side->qp) == 0, "destroy");
      new_qp(side);
      connect_side(side, socket);
    } else if (letter == 'd') {  // the region goes
      need(ibv_dereg_mr(side->mr) == 0, "deregister");
    }
    need(write(socket, &letter, 1) == 1, "answer");
  }
}

static char ask(int socket, char letter) {
  char answer = 0;
  need(write(socket, &letter, 1) == 1 && read(socket, &answer, 1) == 1, "the peer answers");
  return answer;
}

// A queue pair that has failed is replaced on both sides.
static void renew(struct side *side, int socket) {
  struct ibv_wc wc[16];
  while (ibv_poll_cq(side->cq, 16, wc) > 0) continue;
  need(ibv_destroy_qp(side->qp) == 0, "destroy");
  new_qp(side);
  char letter = 'n';
  need(write(socket, &letter, 1) == 1, "ask");
  connect_side(side, socket);
  need(read(socket, &letter, 1) == 1 && letter == 'n', "the peer is there again");
}

static void check_events(struct side *side) {
  struct pollfd ready = {side->channel->fd, POLLIN, 0};
  need(ibv_req_notify_cq(side->cq, 0) == 0, "arm");
  check(poll(&ready, 1, 50) == 0, "an armed queue without completions is silent");
  read_from(side, side->mr->lkey, side->theirs.rkey, side->theirs.address, 8);
  struct ibv_cq *cq = NULL;
  void *context;
  bool rung = poll(&ready, 1, 2000) == 1 && ibv_get_cq_event(side->channel, &cq, &context) == 0;
  check(rung && cq == side->cq, "a completion rings the channel");
  ibv_ack_cq_events(side->cq, 1);
  read_from(side, side->mr->lkey, side->theirs.rkey, side->theirs.address, 8);
  check(poll(&ready, 1, 50) == 0, "once for each time that it was armed");
}

static void check_queue(struct side *side, int socket) {
  struct ibv_sge sge = {side->mine.address, 8, side->mr->lkey};
  struct ibv_send_wr wrs[DEPTH + 1], *bad = NULL;
  hkv_verbs_inject("delay=100");
  for (int i = 0; i <= DEPTH; i++)
    wrs[i] = (struct ibv_send_wr){.wr_id = (uint64_t)i, .next = i < DEPTH ? &wrs[i + 1] : NULL,
                                  .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
                                  .send_flags = i == DEPTH - 1 ? IBV_SEND_SIGNALED : 0,
                                  .wr.rdma = {side->theirs.address, side->theirs.rkey}};
  check(ibv_post_send(side->qp, wrs, &bad) != 0 && bad == &wrs[DEPTH],
        "a request beyond the queue's depth is the bad one");
  check(wait_for(side).wr_id == DEPTH - 1, "only the signalled request completes");
  check(post(side, IBV_WR_RDMA_READ, side->mr->lkey, side->mine.address, side->theirs.rkey,
             side->theirs.address, 8) == 0, "its completion frees all entries before it");
  wait_for(side);
  hkv_verbs_inject("read=fatal:after=2:count=1");
  wrs[4].next = NULL;
  need(ibv_post_send(side->qp, wrs, &bad) == 0, "post five");
  struct ibv_wc wc = wait_for(side);
  check(wc.wr_id == 2 && wc.status == IBV_WC_FATAL_ERR, "an injected error completes unsignalled");
  bool flushed = true;
  for (uint64_t i = 3; i < 5; i++) {
    wc = wait_for(side);
    flushed = flushed && wc.wr_id == i && wc.status == IBV_WC_WR_FLUSH_ERR;
  }
  check(flushed, "and those behind it are flushed in order");
  hkv_verbs_inject("");
  renew(side, socket);
}

static void check_dereg(struct side *side) {
  hkv_verbs_inject("rate=4");
  memset(side->memory + BYTES / 2, 0x11, BYTES / 4);
  need(post(side, IBV_WR_RDMA_READ, side->mr->lkey, side->mine.address + BYTES / 2,
            side->theirs.rkey, side->theirs.address, BYTES / 4) == 0, "post a slow read");
  usleep(30000);
  need(ibv_dereg_mr(side->mr) == 0, "deregister");
  memset(side->memory + BYTES / 2, 0x22, BYTES / 4);
  enum ibv_wc_status status = wait_for(side).status;
  usleep(50000);
  bool quiet = true;
  for (int i = 0; i < BYTES / 4; i++) quiet = quiet && side->memory[BYTES / 2 + i] == 0x22;
  check(quiet, "nothing is written through a region that is deregistered");
  check(status == IBV_WC_LOC_PROT_ERR, "the read that needed it fails by the local region");
  hkv_verbs_inject("");
  side->mr = ibv_reg_mr(side->pd, side->memory, BYTES, access_all());
}

int main(void) {
  int sockets[2];
  need(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "socketpair");
  pid_t child = fork();
  struct side side = {0};
  if (child == 0) {
    close(sockets[0]);
    open_side(&side);
    for (int i = 0; i < BYTES; i++) side.memory[i] = (uint8_t)(i * 7);
    connect_side(&side, sockets[1]);
    serve(&side, sockets[1]);
    return 0;
  }
  close(sockets[1]);
  int peer = sockets[0];
  open_side(&side);
  connect_side(&side, peer);
  uint32_t lkey = side.mr->lkey;
  const struct card *there = &side.theirs;

  bool same = read_from(&side, lkey, there->rkey, there->address, 5000) == IBV_WC_SUCCESS;
  for (int i = 0; i < 5000; i++) same = same && side.memory[BYTES / 2 + i] == (uint8_t)(i * 7);
  check(same, "a read brings the bytes");
  check(read_from(&side, lkey, there->rkey, there->address + BYTES - 8, 8) == IBV_WC_SUCCESS,
        "up to the last byte");
  check_events(&side);
  check_queue(&side, peer);

  struct {
    uint32_t lkey, rkey;
    uint64_t remote;
    uint32_t bytes;
    enum ibv_wc_status status;
    const char *what;
  } wrong[] = {
      {lkey, there->rkey, there->address + BYTES - 8, 9, IBV_WC_REM_ACCESS_ERR, "a read beyond the region"},
      {lkey, there->rkey, there->address - 1, 8, IBV_WC_REM_ACCESS_ERR, "a read before the region"},
      {lkey, there->rkey + 256 * 9, there->address, 8, IBV_WC_REM_ACCESS_ERR, "a key that is none"},
      {lkey, there->rkey + 1, there->address, 8, IBV_WC_REM_ACCESS_ERR, "a key of another registration"},
      {side.read_only->lkey, there->rkey, there->address, 8, IBV_WC_LOC_PROT_ERR, "a local region that may not be written"},
      {lkey + 256 * 9, there->rkey, there->address, 8, IBV_WC_LOC_PROT_ERR, "a local key that is none"},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    enum ibv_wc_status status =
        read_from(&side, wrong[i].lkey, wrong[i].rkey, wrong[i].remote, wrong[i].bytes);
    check(status == wrong[i].status, wrong[i].what);
    check(post(&side, IBV_WR_RDMA_READ, lkey, side.mine.address, there->rkey, there->address, 8) == 0 &&
              wait_for(&side).status == IBV_WC_WR_FLUSH_ERR,
          "  and the queue pair does nothing more");
    renew(&side, peer);
  }

  memset(side.memory, 0x33, 64);
  struct {
    uint32_t lkey, rkey;
    uint64_t remote;
    enum ibv_wc_status status;
    const char *what;
  } wrong_writes[] = {
      {lkey, there->read_only, there->address, IBV_WC_REM_ACCESS_ERR, "a write to a region that is read only"},
      {lkey, there->narrowed, there->address, IBV_WC_REM_ACCESS_ERR, "a write to a region whose right was taken away"},
      {lkey, there->rkey, there->address + BYTES - 63, IBV_WC_REM_ACCESS_ERR, "a write beyond the region"},
      {lkey, there->rkey, there->address - 1, IBV_WC_REM_ACCESS_ERR, "a write before the region"},
      {lkey, there->rkey + 256 * 9, there->address, IBV_WC_REM_ACCESS_ERR, "a write by a key that is none"},
      {lkey, there->rkey + 1, there->address, IBV_WC_REM_ACCESS_ERR, "a write by the key of another registration"},
      {lkey + 256 * 9, there->rkey, there->address, IBV_WC_LOC_PROT_ERR, "a write by a local key that is none"},
  };
  for (size_t i = 0; i < sizeof wrong_writes / sizeof *wrong_writes; i++) {
    enum ibv_wc_status status =
        write_to(&side, wrong_writes[i].lkey, wrong_writes[i].rkey, wrong_writes[i].remote, 64);
    check(status == wrong_writes[i].status, wrong_writes[i].what);
    renew(&side, peer);
  }
  bool untouched = read_from(&side, lkey, there->rkey, there->address, 64) == IBV_WC_SUCCESS;
  for (int i = 0; i < 64; i++) untouched = untouched && side.memory[BYTES / 2 + i] == (uint8_t)(i * 7);
  check(untouched, "none of them wrote a byte");
  hkv_verbs_inject("write=access:after=1");
  check(write_to(&side, lkey, there->rkey, there->address + 512, 64) == IBV_WC_SUCCESS &&
            write_to(&side, lkey, there->rkey, there->address + 1024, 64) == IBV_WC_REM_ACCESS_ERR,
        "a write fails on demand");
  hkv_verbs_inject("");
  renew(&side, peer);
  post(&side, IBV_WR_RDMA_WRITE, lkey, side.mine.address, there->rkey, there->address + 512, 64);
  check(wait_for(&side).status == IBV_WC_SUCCESS, "a write");
  read_from(&side, lkey, there->rkey, there->address + 512, 64);
  check(memcmp(side.memory, side.memory + BYTES / 2, 64) == 0, "is there");

  post(&side, IBV_WR_SEND, lkey, side.mine.address, 0, 0, 64);
  check(wait_for(&side).status == IBV_WC_RNR_RETRY_EXC_ERR, "a send without a receive");
  renew(&side, peer);
  ask(peer, 'r');
  post(&side, IBV_WR_SEND_WITH_IMM, lkey, side.mine.address, 0, 0, 64);
  check(wait_for(&side).status == IBV_WC_SUCCESS && ask(peer, 'c') == 's', "a send with one");
  read_from(&side, lkey, there->rkey, there->address + 1000, 64);
  check(memcmp(side.memory, side.memory + BYTES / 2, 64) == 0, "arrives in its memory");
  ask(peer, 'r');
  post(&side, IBV_WR_RDMA_WRITE_WITH_IMM, lkey, side.mine.address, there->rkey, there->address + 2048, 64);
  check(wait_for(&side).status == IBV_WC_SUCCESS && ask(peer, 'c') == 'w', "a write with an immediate");

  check_dereg(&side);
  renew(&side, peer);
  ask(peer, 'd');
  check(read_from(&side, side.mr->lkey, there->rkey, there->address, 8) == IBV_WC_REM_ACCESS_ERR,
        "a region that the peer has deregistered");
  renew(&side, peer);
  kill(child, SIGKILL);
  waitpid(child, NULL, 0);
  check(read_from(&side, side.mr->lkey, there->read_only, there->address, 8) == IBV_WC_RETRY_EXC_ERR,
        "a peer that has ended");
  printf("%d failures\n", failures);
  return failures;
}
