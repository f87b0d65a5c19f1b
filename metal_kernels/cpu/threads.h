// Work shared between threads.
#pragma once
#include <stddef.h>

// Computes items first to last - 1 in a thread, numbered from 0, whose scratch nobody else uses.
typedef void (*Part)(const void *what, size_t first, size_t last, int thread);

// One call computes at a time: a call holds the lock from its begin to its end.
void begin_call(void);
void end_call(void);
// How many threads compute, the caller included.
int thread_count(void);
// Compute ``count`` items, ``chunk`` of them at a time, in whatever thread is free. Returns when all are done.
void run_parts(Part part, const void *what, size_t count, size_t chunk);
// Memory of a thread, aligned to 64 bytes, until the thread asks again.
float *scratch(int thread, size_t floats);
// The same for what all threads of a call read.
float *shared_scratch(size_t floats);
