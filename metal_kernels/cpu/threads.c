// A pool: the caller and its workers take chunks of a job from a counter. Workers spin shortly for the next job,
// then sleep. A worker joins a job under the lock, so one that wakes late finds it closed and the caller never
// waits for it. After a fork the child has no workers, and starts its own with the first job.
#include "threads.h"
#include "lanes.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_THREADS = 256, SPINS = 4000 };

static pthread_mutex_t calls = PTHREAD_MUTEX_INITIALIZER, lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t posted = PTHREAD_COND_INITIALIZER, finished = PTHREAD_COND_INITIALIZER;
static int threads = 1;

// Under the lock.
static struct {
  Part part;
  const void *what;
  size_t count, chunk;
  int joined;
} job;
static int workers;

static _Atomic size_t next_item;
static _Atomic unsigned jobs;  // posted so far
static _Atomic bool is_open;
static _Atomic int active;

static struct {
  float *memory;
  size_t floats;
} rooms[MAX_THREADS + 1];

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  __asm__ volatile("yield");
#endif
}

static void take_chunks(int thread) {
  for (;;) {
    size_t first = atomic_fetch_add(&next_item, job.chunk);
    if (first >= job.count) return;
    size_t last = first + job.chunk < job.count ? first + job.chunk : job.count;
    job.part(job.what, first, last, thread);
  }
}

static void *work(void *unused) {
  (void)unused;
  unsigned seen = 0;
  for (;;) {
    for (int i = 0; i < SPINS && atomic_load(&jobs) == seen; i++) relax();
    pthread_mutex_lock(&lock);
    while (atomic_load(&jobs) == seen) pthread_cond_wait(&posted, &lock);
    seen = atomic_load(&jobs);
    bool joins = atomic_load(&is_open) && job.joined + 1 < threads;
    int thread = joins ? ++job.joined : 0;
    if (joins) atomic_fetch_add(&active, 1);
    pthread_mutex_unlock(&lock);
    if (!joins) continue;
    take_chunks(thread);
    pthread_mutex_lock(&lock);
    if (atomic_fetch_sub(&active, 1) == 1) pthread_cond_signal(&finished);
    pthread_mutex_unlock(&lock);
  }
  return NULL;
}

static void start_workers(void) {
  pthread_attr_t detached;
  pthread_attr_init(&detached);
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  for (pthread_t id; workers < threads - 1; workers++)
    if (pthread_create(&id, &detached, work, NULL)) break;  // the threads that there are do all
  pthread_attr_destroy(&detached);
}

void run_parts(Part part, const void *what, size_t count, size_t chunk) {
  if (threads == 1 || count <= chunk) {
    if (count) part(what, 0, count, 0);
    return;
  }
  start_workers();
  pthread_mutex_lock(&lock);
  job.part = part;
  job.what = what;
  job.count = count;
  job.chunk = chunk;
  job.joined = 0;
  atomic_store(&next_item, 0);
  atomic_store(&is_open, true);
  atomic_fetch_add(&jobs, 1);
  pthread_cond_broadcast(&posted);
  pthread_mutex_unlock(&lock);
  take_chunks(0);
  // Late workers find no items left; whoever has joined is waited for.
  for (int i = 0; i < SPINS && atomic_load(&active); i++) relax();
  pthread_mutex_lock(&lock);
  atomic_store(&is_open, false);
  while (atomic_load(&active)) pthread_cond_wait(&finished, &lock);
  pthread_mutex_unlock(&lock);
}

static float *room(int index, size_t floats) {
  if (rooms[index].floats < floats) {
    free(rooms[index].memory);
    rooms[index].floats = (floats + 15) / 16 * 16;
    rooms[index].memory = aligned_alloc(64, rooms[index].floats * sizeof(float));
    if (!rooms[index].memory) {
      fprintf(stderr, "metal_kernels/cpu needs %zu bytes of memory, which are not there\n", floats * sizeof(float));
      abort();
    }
  }
  return rooms[index].memory;
}

float *scratch(int thread, size_t floats) { return room(thread, floats); }
float *shared_scratch(size_t floats) { return room(MAX_THREADS, floats); }

int thread_count(void) { return threads; }
void begin_call(void) { pthread_mutex_lock(&calls); }
void end_call(void) { pthread_mutex_unlock(&calls); }

static void before_fork(void) {
  pthread_mutex_lock(&calls);
  pthread_mutex_lock(&lock);
}

static void after_fork(void) {
  pthread_mutex_unlock(&lock);
  pthread_mutex_unlock(&calls);
}

static void in_child(void) {
  workers = 0;
  atomic_store(&jobs, 0);
  pthread_cond_init(&posted, NULL);
  pthread_cond_init(&finished, NULL);
  after_fork();
}

__attribute__((constructor)) static void watch_forks(void) { pthread_atfork(before_fork, after_fork, in_child); }

EXPORT const char *cpu_instructions(void) { return INSTRUCTIONS; }
EXPORT int cpu_thread_count(void) { return threads; }

EXPORT void cpu_threads(int count) {
  begin_call();
  pthread_mutex_lock(&lock);
  threads = count < 1 ? 1 : count > MAX_THREADS ? MAX_THREADS : count;
  pthread_mutex_unlock(&lock);
  end_call();
}
