// What can be made to go wrong, and what is counted. Rules come from HKV_VERBS_FAULTS at the first
// use, and from `hkv_verbs_inject` later, separated by `;`:
//
//   read=STATUS[:after=N][:count=M]   and write=, send=: requests after the Nth complete with STATUS
//                                     (rnr, retry, flush, access, protection, length, fatal) instead
//                                     of being carried out, M of them
//   post=ERRNO[:after=N][:count=M]    ibv_post_send refuses the request (enomem, einval, eio)
//   region=ERRNO[:after=N][:count=M]  ibv_reg_mr refuses
//   rights=readonly[:after=N][:count=M]  ibv_reg_mr gives peers no right to write the region
//   event=fatal[:after=N][:count=M]   the device says with the request after the Nth that it has
//                                     failed as a whole; what it does goes by the other rules
//   delay=MICROSECONDS                before each request
//   rate=MEGABYTES_PER_SECOND         of all requests of a device together
//   reorder=1                         queue pairs are served latest first

#define _GNU_SOURCE
#include "double.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RULES_MAX = 16 };

enum target { READ, WRITE, SEND, POST, REGION, RIGHTS, EVENT };

struct rule {
  enum target target;
  int value;
  uint64_t after, count;
};

static const struct {
  const char *name;
  int value;
} VALUES[] = {
    {"rnr", IBV_WC_RNR_RETRY_EXC_ERR},   {"retry", IBV_WC_RETRY_EXC_ERR},
    {"flush", IBV_WC_WR_FLUSH_ERR},      {"access", IBV_WC_REM_ACCESS_ERR},
    {"protection", IBV_WC_LOC_PROT_ERR}, {"length", IBV_WC_LOC_LEN_ERR},
    {"fatal", IBV_WC_FATAL_ERR},         {"enomem", ENOMEM},
    {"einval", EINVAL},                  {"eio", EIO},
    {"readonly", 1},
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct rule rules[RULES_MAX];
static int rule_count;
static _Atomic bool any_rule, any_pace;
static _Atomic uint64_t delay_us, rate_mbps, reorder_all;
static uint64_t seen[EVENT + 1];
static _Atomic uint64_t posts, works, moved;

uint64_t now_ns(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return (uint64_t)at.tv_sec * 1000000000u + (uint64_t)at.tv_nsec;
}

static int value_of(const char *name) {
  for (size_t i = 0; i < sizeof VALUES / sizeof *VALUES; i++)
    if (strcmp(VALUES[i].name, name) == 0) return VALUES[i].value;
  return NO_FAULT;
}

static int add_rule(char *text) {
  static const char *const targets[] = {"read",   "write",  "send", "post",
                                        "region", "rights", "event"};
  char *rest = text;
  char *name = strsep(&rest, "=");
  char *value = strsep(&rest, ":");
  if (value == NULL) return EINVAL;
  uint64_t number = strtoull(value, NULL, 10);
  if (strcmp(name, "delay") == 0) return atomic_store(&delay_us, number), 0;
  if (strcmp(name, "rate") == 0) return atomic_store(&rate_mbps, number), 0;
  if (strcmp(name, "reorder") == 0) return atomic_store(&reorder_all, number), 0;
  struct rule rule = {.value = value_of(value), .count = UINT64_MAX};
  int target = -1;
  for (int i = 0; i <= EVENT; i++)
    if (strcmp(targets[i], name) == 0) target = i;
  if (target < 0 || rule.value == NO_FAULT || rule_count == RULES_MAX) return EINVAL;
  rule.target = (enum target)target;
  for (char *part; (part = strsep(&rest, ":")) != NULL;) {
    if (sscanf(part, "after=%lu", &rule.after) != 1 && sscanf(part, "count=%lu", &rule.count) != 1)
      return EINVAL;
  }
  rules[rule_count++] = rule;
  return 0;
}

// Replaces all rules; counting starts anew. 0, or EINVAL for what is no rule.
int hkv_verbs_inject(const char *text) {
  char copy[1024];
  if (strlen(text) >= sizeof copy) return EINVAL;
  strcpy(copy, text);
  pthread_mutex_lock(&lock);
  rule_count = 0;
  memset(seen, 0, sizeof seen);
  atomic_store(&delay_us, 0);
  atomic_store(&rate_mbps, 0);
  atomic_store(&reorder_all, 0);
  int result = 0;
  char *rest = copy;
  for (char *part; result == 0 && (part = strsep(&rest, ";")) != NULL;)
    if (*part != 0) result = add_rule(part);
  atomic_store(&any_rule, rule_count > 0);
  atomic_store(&any_pace, atomic_load(&delay_us) > 0 || atomic_load(&rate_mbps) > 0);
  pthread_mutex_unlock(&lock);
  return result;
}

static void from_environment(void) {
  const char *text = getenv("HKV_VERBS_FAULTS");
  if (text != NULL && hkv_verbs_inject(text) != 0) {
    fprintf(stderr, "verbs double: HKV_VERBS_FAULTS=%s is no list of rules\n", text);
    abort();
  }
}

static int fault_of(enum target target) {
  int found = NO_FAULT;
  pthread_once(&once, from_environment);
  if (!atomic_load(&any_rule)) return NO_FAULT;
  pthread_mutex_lock(&lock);
  uint64_t number = seen[target]++;
  for (int i = 0; i < rule_count && found == NO_FAULT; i++) {
    const struct rule *rule = &rules[i];
    if (rule->target == target && number >= rule->after && number - rule->after < rule->count)
      found = rule->value;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

int fault_of_post(void) { return fault_of(POST); }

int fault_of_region(void) { return fault_of(REGION); }

bool is_read_only(void) { return fault_of(RIGHTS) != NO_FAULT; }

bool device_fails(void) { return fault_of(EVENT) != NO_FAULT; }

int fault_of_work(enum ibv_wr_opcode opcode) {
  if (opcode == IBV_WR_RDMA_READ) return fault_of(READ);
  bool send = opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM;
  return fault_of(send ? SEND : WRITE);
}

static void sleep_ns(uint64_t ns) {
  struct timespec time = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
  nanosleep(&time, NULL);
}

void hold_back(uint64_t bytes) {
  pthread_once(&once, from_environment);
  if (!atomic_load(&any_pace)) return;
  uint64_t ns = atomic_load(&delay_us) * 1000;
  uint64_t rate = atomic_load(&rate_mbps);
  if (rate > 0) ns += bytes * 1000 / rate;
  if (ns > 0) sleep_ns(ns);
}

bool reorders(void) {
  pthread_once(&once, from_environment);
  return atomic_load(&reorder_all) != 0;
}

void count_post(void) { atomic_fetch_add(&posts, 1); }

void count_work(uint64_t bytes) {
  atomic_fetch_add(&works, 1);
  atomic_fetch_add(&moved, bytes);
}

// Counters of this process as one JSON text: what is alive, and what was done since the start.
int hkv_verbs_report(char *out, size_t bytes) {
  struct publication *own = own_publication();
  unsigned regions = 0, qps = 0;
  for (int i = 0; own != NULL && i < REGIONS_MAX; i++) regions += atomic_load(&own->regions[i].key) != 0;
  for (int i = 0; own != NULL && i < QUEUE_PAIRS_MAX; i++) qps += atomic_load(&own->qps[i].number) != 0;
  return snprintf(out, bytes,
                  "{\"regions\": %u, \"queue_pairs\": %u, \"posts\": %lu, \"requests\": %lu, "
                  "\"bytes\": %lu}",
                  regions, qps, atomic_load(&posts), atomic_load(&works), atomic_load(&moved));
}
