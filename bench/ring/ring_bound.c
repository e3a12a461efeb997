/* The bound for bench/ring/suite.py: one producer and one consumer process, each pinned to a core, that
 * spin on a shared sequence number. A message costs two memcpy: into the ring and out of it.
 * Usage: ring_bound CORE CORE BYTES COUNT GAP_NS; prints the median latency, or for GAP_NS = 0 the
 * mean time per message, in ns. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { SLOTS = 16 };

struct shared {
  _Alignas(64) _Atomic uint64_t sent;
  _Alignas(64) _Atomic uint64_t taken;
  _Alignas(64) uint64_t times[SLOTS];
};

static uint64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (sched_setaffinity(0, sizeof set, &set)) { perror("sched_setaffinity"); exit(1); }
}

static int by_value(const void *a, const void *b) {
  uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return x < y ? -1 : x > y;
}

int main(int argc, char **argv) {
  if (argc != 6) return 2;
  size_t bytes = strtoull(argv[3], 0, 10), count = strtoull(argv[4], 0, 10);
  uint64_t gap = strtoull(argv[5], 0, 10);
  size_t stride = (bytes + 4095) / 4096 * 4096;
  struct shared *ring = mmap(0, sizeof *ring + 4096, PROT_READ | PROT_WRITE,
                             MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  char *slots = mmap(0, SLOTS * stride, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  char *mine = malloc(bytes);
  uint64_t *latency = malloc(count * sizeof *latency);
  if (ring == MAP_FAILED || slots == MAP_FAILED || !mine || !latency) return 1;
  memset(mine, 1, bytes);
  pid_t child = fork();
  if (child < 0) return 1;
  if (child == 0) {
    pin(atoi(argv[2]));
    for (uint64_t i = 0; i < count; i++) {
      while (gap && atomic_load_explicit(&ring->taken, memory_order_acquire) < i) {}
      uint64_t next = now() + gap;
      while (gap && now() < next) {}
      while (i - atomic_load_explicit(&ring->taken, memory_order_acquire) >= SLOTS) {}
      ring->times[i % SLOTS] = now();
      memcpy(slots + i % SLOTS * stride, mine, bytes);
      atomic_store_explicit(&ring->sent, i + 1, memory_order_release);
    }
    _exit(0);
  }
  pin(atoi(argv[1]));
  uint64_t start = 0;
  for (uint64_t i = 0; i < count; i++) {
    while (atomic_load_explicit(&ring->sent, memory_order_acquire) == i) {}
    memcpy(mine, slots + i % SLOTS * stride, bytes);
    uint64_t sent = ring->times[i % SLOTS], end = now();
    latency[i] = end - sent;
    if (i == 0) start = end;
    atomic_store_explicit(&ring->taken, i + 1, memory_order_release);
  }
  uint64_t total = now() - start;
  waitpid(child, 0, 0);
  qsort(latency, count, sizeof *latency, by_value);
  /* The sum keeps the copies from being optimised away. */
  printf("%.1f %d\n", gap ? (double)latency[count / 2] : (double)total / (double)(count - 1), mine[bytes - 1]);
  return 0;
}
