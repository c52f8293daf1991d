// What a process tells its peers: its regions and its queue pairs, in a file that they map.

#define _GNU_SOURCE
#include "double.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// Peers whose publications are mapped at once.
enum { PEERS_MAX = 256 };

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_rwlock_t regions_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct publication *own;
static struct {
  uint32_t pid;
  struct publication *mapped;
} peers[PEERS_MAX];

// All processes of a test meet in one folder: HKV_VERBS_DIR, or one of the user's own.
static char folder[128];

static void make_folder(void) {
  const char *named = getenv("HKV_VERBS_DIR");
  if (named != NULL) snprintf(folder, sizeof folder, "%s", named);
  else snprintf(folder, sizeof folder, "/dev/shm/hkv_verbs_%u", (unsigned)getuid());
  mkdir(folder, 0700);
}

const char *meeting_folder(void) {
  static pthread_once_t made = PTHREAD_ONCE_INIT;
  pthread_once(&made, make_folder);
  return folder;
}

static void path_of(uint32_t pid, char *out, size_t bytes) {
  snprintf(out, bytes, "%s/%u", meeting_folder(), pid);
}

static void remove_own(void) {
  char path[256];
  if (own == NULL || own->pid != (uint32_t)getpid()) return;
  path_of(own->pid, path, sizeof path);
  unlink(path);
}

static void init_shared(pthread_mutex_t *lock) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(lock, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

// A holder that was killed leaves nothing half done that matters: its peers go with it.
void lock_shared(pthread_mutex_t *lock) {
  if (pthread_mutex_lock(lock) == EOWNERDEAD) pthread_mutex_consistent(lock);
}

struct publication *own_publication(void) {
  pthread_mutex_lock(&table_lock);
  if (own == NULL) {
    char path[256];
    path_of((uint32_t)getpid(), path, sizeof path);
    unlink(path);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd >= 0 && ftruncate(fd, sizeof *own) == 0) {
      void *mapped = mmap(NULL, sizeof *own, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (mapped != MAP_FAILED) {
        own = mapped;
        own->pid = (uint32_t)getpid();
        init_shared(&own->gate);
        for (int i = 0; i < QUEUE_PAIRS_MAX; i++) init_shared(&own->qps[i].lock);
        atomic_store(&own->ready, 1);
        atexit(remove_own);
      }
    }
    if (fd >= 0) close(fd);
    if (own == NULL) fprintf(stderr, "verbs double: %s: %s\n", path, strerror(errno));
  }
  pthread_mutex_unlock(&table_lock);
  return own;
}

struct publication *peer_publication(uint32_t pid) {
  if (pid == (uint32_t)getpid()) return own_publication();
  struct publication *found = NULL;
  pthread_mutex_lock(&table_lock);
  int slot = -1;
  for (int i = 0; i < PEERS_MAX && found == NULL; i++) {
    if (peers[i].mapped != NULL && peers[i].pid == pid) found = peers[i].mapped;
    if (peers[i].mapped == NULL && slot < 0) slot = i;
  }
  if (found == NULL && slot >= 0) {
    char path[256];
    struct stat status;
    path_of(pid, path, sizeof path);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0 && fstat(fd, &status) == 0 && status.st_size == sizeof *own) {
      void *mapped = mmap(NULL, sizeof *own, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (mapped != MAP_FAILED) {
        found = mapped;
        peers[slot].pid = pid;
        peers[slot].mapped = found;
      }
    }
    if (fd >= 0) close(fd);
  }
  pthread_mutex_unlock(&table_lock);
  return found != NULL && atomic_load(&found->ready) ? found : NULL;
}

struct region *find_region(struct publication *owner, uint32_t key) {
  uint32_t index = key >> 8;
  if (index >= REGIONS_MAX || key == 0) return NULL;
  struct region *region = &owner->regions[index];
  return atomic_load(&region->key) == key ? region : NULL;
}

void hold_regions(void) { pthread_rwlock_rdlock(&regions_lock); }

void release_regions(void) { pthread_rwlock_unlock(&regions_lock); }

struct ibv_mr *register_region(struct ibv_pd *pd, void *address, size_t bytes, int access) {
  static uint8_t generations[REGIONS_MAX];
  struct publication *publication = own_publication();
  int fault = fault_of_region();
  if (publication == NULL || fault != NO_FAULT) {
    errno = fault != NO_FAULT ? fault : ENOMEM;
    return NULL;
  }
  bool remote_write = access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
  if (bytes == 0 || (remote_write && !(access & IBV_ACCESS_LOCAL_WRITE))) {
    errno = EINVAL;
    return NULL;
  }
  if (is_read_only()) access &= ~(IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
  struct ibv_mr *mr = calloc(1, sizeof *mr);
  if (mr == NULL) return NULL;
  pthread_rwlock_wrlock(&regions_lock);
  // Slot 0 is never used, so that no key is 0.
  for (uint32_t index = 1; index < REGIONS_MAX && mr->lkey == 0; index++) {
    struct region *region = &publication->regions[index];
    if (atomic_load(&region->key) != 0) continue;
    region->access = (uint32_t)access;
    region->address = (uint64_t)(uintptr_t)address;
    region->bytes = bytes;
    region->domain = ((struct domain *)pd)->id;
    mr->lkey = index << 8 | ++generations[index];
    atomic_store(&region->key, mr->lkey);
  }
  pthread_rwlock_unlock(&regions_lock);
  if (mr->lkey == 0) {
    free(mr);
    errno = ENOMEM;
    return NULL;
  }
  mr->context = pd->context;
  mr->pd = pd;
  mr->addr = address;
  mr->length = bytes;
  mr->rkey = mr->lkey;
  return mr;
}

int deregister_region(struct ibv_mr *mr) {
  struct publication *publication = own_publication();
  struct region *region = publication != NULL ? find_region(publication, mr->lkey) : NULL;
  if (region == NULL) return EINVAL;
  pthread_rwlock_wrlock(&regions_lock);
  lock_shared(&publication->gate);
  atomic_store(&region->key, 0);
  pthread_mutex_unlock(&publication->gate);
  pthread_rwlock_unlock(&regions_lock);
  free(mr);
  return 0;
}
