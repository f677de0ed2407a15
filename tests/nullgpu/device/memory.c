// Memory of the device: address space without pages, counted for each device. Bytes get a page when they are
// written. What is unmapped, such as the weights of an engine that sleeps, cannot be touched.
#define _GNU_SOURCE
#include "null.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096UL
#define GRANULE (2UL << 20)

enum where { ON_DEVICE, MAPPED, PINNED, REGISTERED };

struct range {
    uintptr_t start;
    size_t bytes;
    int device;
    enum where where;
};

static __thread int selected;
static __thread cudaError_t last_error;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range *ranges; // sorted by start, none overlap
static size_t known, room;
static size_t used[MOST_DEVICES], peak[MOST_DEVICES];

int current_device(void) { return selected; }
void select_device(int device) { selected = device; }
size_t used_bytes(int device) { return used[device]; }

cudaError_t failed(cudaError_t error) {
    last_error = error;
    return error;
}

// Position of the first range that ends after this address.
static size_t position(uintptr_t address) {
    size_t low = 0, high = known;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].start + ranges[middle].bytes <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct range *range_of(const void *pointer) {
    size_t at = position((uintptr_t)pointer);
    bool inside = at < known && ranges[at].start <= (uintptr_t)pointer;
    return inside ? &ranges[at] : NULL;
}

static void take(int device, size_t bytes) {
    used[device] += bytes;
    if (used[device] > peak[device])
        peak[device] = used[device];
}

static void remember(void *start, size_t bytes, int device, enum where where) {
    pthread_mutex_lock(&lock);
    if (known == room) {
        room = room ? 2 * room : 1024;
        ranges = realloc(ranges, room * sizeof *ranges);
    }
    size_t at = position((uintptr_t)start);
    memmove(ranges + at + 1, ranges + at, (known - at) * sizeof *ranges);
    ranges[at] = (struct range){(uintptr_t)start, bytes, device, where};
    known++;
    if (where == ON_DEVICE)
        take(device, bytes);
    pthread_mutex_unlock(&lock);
}

// Takes the range that starts here out of the list. False: there is none of this kind.
static bool forget(void *start, enum where where, struct range *out) {
    pthread_mutex_lock(&lock);
    struct range *found = range_of(start);
    bool right = found && found->start == (uintptr_t)start && found->where == where;
    if (right) {
        *out = *found;
        size_t after = known - (size_t)(found - ranges) - 1;
        memmove(found, found + 1, after * sizeof *ranges);
        known--;
        if (where == ON_DEVICE)
            used[out->device] -= out->bytes;
    }
    pthread_mutex_unlock(&lock);
    return right;
}

static bool found_as(const void *pointer, enum where one, enum where other) {
    pthread_mutex_lock(&lock);
    struct range *found = range_of(pointer);
    bool right = found && (found->where == one || found->where == other);
    pthread_mutex_unlock(&lock);
    return right;
}

bool is_pinned(const void *pointer) { return found_as(pointer, PINNED, REGISTERED); }
bool is_device(const void *pointer) { return found_as(pointer, ON_DEVICE, MAPPED); }

void copy(void *to, const void *from, size_t bytes) {
    if (bytes <= settings.copy_bytes)
        memmove(to, from, bytes);
}

static void *reserve(size_t bytes, int rights) {
    void *got = mmap(NULL, bytes, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return got == MAP_FAILED ? NULL : got;
}

// --- the runtime's allocations

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = settings.memory_bytes;
    *free_bytes = *total - used[selected];
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes) {
    size_t rounded = (bytes + PAGE - 1) & ~(PAGE - 1);
    if (!rounded)
        rounded = PAGE;
    count("call", "cudaMalloc", rounded);
    if (used[selected] + rounded > settings.memory_bytes)
        return failed(cudaErrorMemoryAllocation);
    *out = reserve(rounded, PROT_READ | PROT_WRITE);
    if (!*out)
        return failed(cudaErrorMemoryAllocation);
    remember(*out, rounded, selected, ON_DEVICE);
    return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) {
    struct range gone;
    if (!pointer)
        return cudaSuccess;
    count_wait("cudaFree");
    if (!forget(pointer, ON_DEVICE, &gone))
        return failed(cudaErrorInvalidValue);
    munmap(pointer, gone.bytes);
    return cudaSuccess;
}

// Where a global variable of a kernel's library lies.
cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
    static void *variables;
    *out = variables ? variables : (variables = reserve(1 << 20, PROT_READ | PROT_WRITE));
    return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *out) {
    memset(out, 0, sizeof(uint64_t));
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) { return cudaMalloc(out, bytes); }
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return cudaFree(pointer); }

// --- page-locked memory of the host

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
    size_t rounded = (bytes + PAGE - 1) & ~(PAGE - 1);
    count("call", "cudaHostAlloc", rounded);
    *out = reserve(rounded ? rounded : PAGE, PROT_READ | PROT_WRITE);
    if (!*out)
        return failed(cudaErrorMemoryAllocation);
    remember(*out, rounded ? rounded : PAGE, selected, PINNED);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }

cudaError_t cudaFreeHost(void *pointer) {
    struct range gone;
    if (!pointer)
        return cudaSuccess;
    if (!forget(pointer, PINNED, &gone))
        return failed(cudaErrorInvalidValue);
    munmap(pointer, gone.bytes);
    return cudaSuccess;
}

// A page can be locked once: pages that were freed while locked, and are locked anew, are an error here as on
// a card.
cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    pthread_mutex_lock(&lock);
    size_t at = position((uintptr_t)pointer);
    bool overlaps = at < known && ranges[at].start < (uintptr_t)pointer + bytes;
    pthread_mutex_unlock(&lock);
    count("call", "cudaHostRegister", bytes);
    if (overlaps)
        return failed(cudaErrorHostMemoryAlreadyRegistered);
    remember(pointer, bytes, selected, REGISTERED);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) {
    struct range gone;
    count("call", "cudaHostUnregister", 0);
    return forget(pointer, REGISTERED, &gone) ? cudaSuccess : failed(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void **out, void *pointer, unsigned flags) {
    *out = pointer;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *pointer) {
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&lock);
    struct range *found = range_of(pointer);
    bool host = found && (found->where == PINNED || found->where == REGISTERED);
    out->type = !found ? cudaMemoryTypeUnregistered : host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    out->device = found ? found->device : -2;
    out->devicePointer = found ? (void *)pointer : NULL;
    out->hostPointer = host ? (void *)pointer : NULL;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

// --- memory of another process: nobody computes with it, so that space of its size is enough

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    memset(handle, 0, sizeof *handle);
    pthread_mutex_lock(&lock);
    struct range *found = range_of(pointer);
    size_t bytes = found ? found->bytes : 0;
    pthread_mutex_unlock(&lock);
    memcpy(handle, &bytes, sizeof bytes);
    return bytes ? cudaSuccess : failed(cudaErrorInvalidValue);
}

cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags) {
    size_t bytes;
    memcpy(&bytes, &handle, sizeof bytes);
    *out = reserve(bytes, PROT_READ | PROT_WRITE);
    remember(*out, bytes, selected, MAPPED);
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    struct range gone;
    if (!forget(pointer, MAPPED, &gone))
        return failed(cudaErrorInvalidValue);
    munmap(pointer, gone.bytes);
    return cudaSuccess;
}

// --- the driver's virtual memory: expandable segments, and vLLM's sleep mode

static struct {
    size_t bytes;
    int device;
} *physical;
static size_t handles, handle_room;

CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *p,
                                       CUmemAllocationGranularity_flags f) {
    *out = GRANULE;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr at,
                             unsigned long long f) {
    // Aligned as on a card: the driver's memory begins at a granule.
    char *got = reserve(bytes + GRANULE, PROT_NONE);
    if (!got)
        return CUDA_ERROR_OUT_OF_MEMORY;
    char *start = (char *)(((uintptr_t)got + GRANULE - 1) & ~(GRANULE - 1));
    if (start > got)
        munmap(got, (size_t)(start - got));
    size_t behind = GRANULE - (size_t)(start - got);
    if (behind)
        munmap(start + bytes, behind);
    *out = (CUdeviceptr)start;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
    munmap((void *)pointer, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *p,
                     unsigned long long f) {
    int device = p ? p->location.id : selected;
    pthread_mutex_lock(&lock);
    bool fits = used[device] + bytes <= settings.memory_bytes;
    if (fits) {
        if (handles == handle_room) {
            handle_room = handle_room ? 2 * handle_room : 1024;
            physical = realloc(physical, handle_room * sizeof *physical);
        }
        physical[handles].bytes = bytes;
        physical[handles].device = device;
        *out = ++handles;
        take(device, bytes);
    }
    pthread_mutex_unlock(&lock);
    count("call", "cuMemCreate", bytes);
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    if (!handle || handle > handles)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&lock);
    used[physical[handle - 1].device] -= physical[handle - 1].bytes;
    physical[handle - 1].bytes = 0;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle h,
                  unsigned long long f) {
    if (!h || h > handles)
        return CUDA_ERROR_INVALID_VALUE;
    mprotect((void *)pointer, bytes, PROT_READ | PROT_WRITE);
    remember((void *)pointer, bytes, physical[h - 1].device, MAPPED);
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
    struct range gone;
    for (size_t done = 0; done < bytes; done += gone.bytes)
        if (!forget((char *)pointer + done, MAPPED, &gone))
            return CUDA_ERROR_INVALID_VALUE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    mmap((void *)pointer, bytes, PROT_NONE, flags, -1, 0);
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr p, size_t bytes, const CUmemAccessDesc *d, size_t n) {
    return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *pointer) {
    *out = 0;
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemExportToShareableHandle(void *o, CUmemGenericAllocationHandle h, CUmemAllocationHandleType t,
                                      unsigned long long f) {
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemGetAddressRange(CUdeviceptr *start, size_t *bytes, CUdeviceptr pointer) {
    pthread_mutex_lock(&lock);
    struct range *found = range_of((void *)pointer);
    if (start)
        *start = found ? found->start : 0;
    if (bytes)
        *bytes = found ? found->bytes : 0;
    pthread_mutex_unlock(&lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute attribute, CUdeviceptr pointer) {
    CUdeviceptr start;
    size_t bytes;
    if (attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR || attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE) {
        if (cuMemGetAddressRange(&start, &bytes, pointer))
            return CUDA_ERROR_INVALID_VALUE;
        if (attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
            *(CUdeviceptr *)out = start;
        else
            *(size_t *)out = bytes;
        return CUDA_SUCCESS;
    }
    struct cudaPointerAttributes known_as;
    cudaPointerGetAttributes(&known_as, (void *)pointer);
    memset(out, 0, sizeof(int));
    if (known_as.type == cudaMemoryTypeUnregistered)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
        *(unsigned *)out = known_as.type == cudaMemoryTypeHost ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
        *(int *)out = known_as.device;
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER || attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER)
        *(void **)out = (void *)pointer;
    return CUDA_SUCCESS;
}

static CUresult answer(cudaError_t error) { return error ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS; }

CUresult cuMemGetInfo(size_t *free_bytes, size_t *total) { return answer(cudaMemGetInfo(free_bytes, total)); }
CUresult cuMemAlloc(CUdeviceptr *out, size_t bytes) { return answer(cudaMalloc((void **)out, bytes)); }
CUresult cuMemFree(CUdeviceptr pointer) { return answer(cudaFree((void *)pointer)); }
CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags) {
    return answer(cudaHostAlloc(out, bytes, flags));
}
CUresult cuMemFreeHost(void *pointer) { return answer(cudaFreeHost(pointer)); }

// --- the errors of a thread

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

// --- what Python calls through ctypes

// Bytes that a device gave away, to everyone in this process; and the most since `nullgpu_forget_peak`.
size_t nullgpu_used_bytes(int device) { return used[device]; }
size_t nullgpu_peak_bytes(int device) { return peak[device]; }
void nullgpu_forget_peak(int device) { peak[device] = used[device]; }
