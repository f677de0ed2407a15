// What the files of the device share. The device answers for libcuda, libcudart, NVML and NCCL; memory is
// address space, small copies are made, kernels do nothing. How it is built and used: ../README.md.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MOST_DEVICES 64

// --- settings.c: read once, when the library is loaded

struct card {
    const char *key;  // value of NULLGPU_CARD
    const char *name; // what the driver calls it
    int major, minor; // compute capability
    int processors;
    int gib;
    int shared_kib; // shared memory of a multiprocessor
    int l2_mib;
    int links; // NVLinks
};

struct settings {
    struct card card;
    int devices;
    int cuda;            // what libcuda says: 13000 is CUDA 13.0
    const char *driver;  // version of the kernel module
    size_t memory_bytes; // of each device
    size_t copy_bytes;   // longer copies are left out
    const char *faults;  // NULLGPU_FAULTS
    const char *record;  // folder for counts; NULL: none
    bool callers;        // whether a host wait notes its Python frames
    bool alone;          // whether the other ranks of a communicator are only believed in
    int patience_s;      // how long a rank waits for the others
};

extern struct settings settings;

// Value of a fault such as "ecc@3=2"; `otherwise` where it was not asked for.
long fault(const char *kind, int device, long otherwise);

// --- counters.c

// Adds one event to the table: a kind ("launch", "wait", "copy", "call", "collective") and what it was.
void count(const char *kind, const char *what, size_t bytes);

// A moment at which the host waits for the device; with NULLGPU_CALLERS its Python frames are kept.
void count_wait(const char *what);

// Appends a line to RECORD/PID.collectives.
void note_collective(const char *line);

// --- memory.c

int current_device(void);
void select_device(int device);
size_t used_bytes(int device);
void copy(void *to, const void *from, size_t bytes);
bool is_pinned(const void *pointer);
bool is_device(const void *pointer);
cudaError_t failed(cudaError_t error); // remembers it for cudaGetLastError

// --- streams.c

bool is_capturing(cudaStream_t stream);
