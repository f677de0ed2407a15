// Streams, events, graphs and launches. A stream is empty at all times: whatever is asked of it is over when
// the call returns. Capture has a state, which spreads by events as on a card.
#define _GNU_SOURCE
#include "null.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct graph {
    size_t launches;
};

struct stream {
    int priority;
    struct graph *captured_by; // NULL: nothing is captured
};

struct event {
    double at_ms;
    struct graph *captured_by;
};

struct kernel {
    const char *name;
};

static struct stream legacy;
static struct stream *members[256]; // streams that joined the capture by an event
static int joined;
static __thread struct graph *captures; // the graph that this thread began

static struct stream *own(cudaStream_t stream) {
    uintptr_t number = (uintptr_t)stream;
    return number <= 2 ? &legacy : (struct stream *)stream; // 0, 1, 2: the default streams
}

bool is_capturing(cudaStream_t stream) { return own(stream)->captured_by != NULL; }

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

// --- streams

static cudaError_t create(cudaStream_t *out, int priority) {
    struct stream *made = calloc(1, sizeof *made);
    made->priority = priority;
    *out = (cudaStream_t)made;
    count("call", "cudaStreamCreate", 0);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *out) { return create(out, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { return create(out, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority) {
    return create(out, priority);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *out) {
    *out = own(stream)->priority;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

static cudaError_t wait_for(cudaStream_t stream, const char *what) {
    count_wait(what);
    return is_capturing(stream) ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait_for(stream, "cudaStreamSynchronize"); }

cudaError_t cudaDeviceSynchronize(void) {
    count_wait("cudaDeviceSynchronize");
    return captures ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

CUresult cuStreamSynchronize(CUstream stream) {
    return wait_for(stream, "cuStreamSynchronize") ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    count_wait("cuCtxSynchronize");
    return CUDA_SUCCESS;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data,
                                  unsigned flags) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}

// --- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
    *out = (cudaEvent_t)calloc(1, sizeof(struct event));
    count("call", "cudaEventCreate", 0);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    struct event *recorded = (struct event *)event;
    recorded->at_ms = now_ms();
    recorded->captured_by = own(stream)->captured_by;
    count("call", "cudaEventRecord", 0);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    count_wait("cudaEventSynchronize");
    return ((struct event *)event)->captured_by ? failed(cudaErrorCapturedEvent) : cudaSuccess;
}

CUresult cuEventSynchronize(CUevent event) {
    count_wait("cuEventSynchronize");
    return CUDA_SUCCESS;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    *ms = (float)(((struct event *)to)->at_ms - ((struct event *)from)->at_ms);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    struct graph *by = ((struct event *)event)->captured_by;
    if (by && !own(stream)->captured_by && joined < 256) {
        own(stream)->captured_by = by;
        members[joined++] = own(stream);
    }
    count("call", "cudaStreamWaitEvent", 0);
    return cudaSuccess;
}

// --- graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    captures = calloc(1, sizeof *captures);
    own(stream)->captured_by = captures;
    joined = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *d,
                                          const cudaGraphEdgeData *e, size_t n,
                                          enum cudaStreamCaptureMode mode) {
    captures = (struct graph *)graph;
    own(stream)->captured_by = captures;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out) {
    struct graph *done = own(stream)->captured_by;
    own(stream)->captured_by = NULL;
    for (int i = 0; i < joined; i++)
        members[i]->captured_by = NULL;
    joined = 0;
    captures = NULL;
    *out = (cudaGraph_t)done;
    count("call", "cudaStreamEndCapture", 0);
    return done ? cudaSuccess : failed(cudaErrorStreamCaptureInvalidated);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) {
    *out = is_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **needs, const cudaGraphEdgeData **edges,
                                     size_t *count_of_needs) {
    struct graph *by = own(stream)->captured_by;
    cudaStreamIsCapturing(stream, status);
    if (id)
        *id = (unsigned long long)(uintptr_t)by;
    if (graph)
        *graph = (cudaGraph_t)by;
    if (needs)
        *needs = NULL;
    if (edges)
        *edges = NULL;
    if (count_of_needs)
        *count_of_needs = 0;
    return cudaSuccess;
}

cudaError_t cudaGraphCreate(cudaGraph_t *out, unsigned flags) {
    *out = (cudaGraph_t)calloc(1, sizeof(struct graph));
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *out) {
    *out = 1; // torch warns of a graph without nodes
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    *out = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    count("launch", "CUDA graph", 0);
    return cudaSuccess;
}

// --- kernels: __cudaRegisterFunction names them when a library is loaded

#define SLOTS (1 << 18)
static struct slot {
    const void *function;
    struct kernel kernel;
} *slots;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct kernel *kernel_of(const void *function, const char *name) {
    pthread_mutex_lock(&lock);
    if (!slots)
        slots = calloc(SLOTS, sizeof *slots);
    size_t at = ((uintptr_t)function * 0x9E3779B97F4A7C15u >> 20) % SLOTS;
    while (slots[at].function && slots[at].function != function)
        at = (at + 1) % SLOTS;
    if (!slots[at].function)
        slots[at].kernel.name = "unnamed kernel";
    slots[at].function = function;
    if (name)
        slots[at].kernel.name = name;
    pthread_mutex_unlock(&lock);
    return &slots[at].kernel;
}

static cudaError_t launch(const struct kernel *kernel, cudaStream_t stream) {
    count(is_capturing(stream) ? "captured" : "launch", kernel->name, 0);
    return cudaSuccess;
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[1];
    return handle;
}

void __cudaRegisterFunction(void **handle, const char *function, char *d, const char *name, int limit,
                            void *a, void *b, void *c, void *e, int *size) {
    kernel_of(function, name);
}

cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *function) {
    *out = (cudaKernel_t)kernel_of(function, NULL);
    return cudaSuccess;
}

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(void **)stream = pushed.stream;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 g, dim3 b, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return launch((struct kernel *)kernel, stream);
}

cudaError_t cudaLaunchKernel(const void *function, dim3 g, dim3 b, void **a, size_t shared,
                             cudaStream_t stream) {
    return launch(kernel_of(function, NULL), stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 g, dim3 b, void **a, size_t s,
                                        cudaStream_t stream) {
    return launch(kernel_of(function, NULL), stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *function, void **arguments) {
    return launch(kernel_of(function, NULL), how->stream);
}

// Kernels of modules: Triton's, and those compiled at run time.

static void *named(const char *name) {
    struct kernel *made = malloc(sizeof *made);
    made->name = strdup(name ? name : "unnamed kernel");
    return made;
}

CUresult cuModuleLoadData(CUmodule *out, const void *image) {
    *out = named("module");
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned n, CUjit_option *o, void **v) {
    return cuModuleLoadData(out, image);
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
    *out = named(name);
    return CUDA_SUCCESS;
}

CUresult cuLibraryLoadData(CUlibrary *out, const void *code, CUjit_option *o, void **v, unsigned n,
                           CUlibraryOption *p, void **w, unsigned m) {
    *out = named("library");
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name) {
    *out = named(name);
    return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *out, CUkernel kernel) {
    *out = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t *out, const void *code, enum cudaJitOption *o, void **v,
                                unsigned n, enum cudaLibraryOption *p, void **w, unsigned m) {
    *out = named("library");
    return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *out, cudaLibrary_t library, const char *name) {
    *out = named(name);
    return cudaSuccess;
}

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUstream stream, void **arguments, void **extra) {
    launch((struct kernel *)function, (cudaStream_t)stream);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *how, CUfunction function, void **arguments, void **extra) {
    launch((struct kernel *)function, (cudaStream_t)how->hStream);
    return CUDA_SUCCESS;
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                   unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                   void **arguments) {
    launch((struct kernel *)function, (cudaStream_t)stream);
    return CUDA_SUCCESS;
}

// Triton asks for the threads and registers of what it compiled.
CUresult cuFuncGetAttribute(int *out, CUfunction_attribute attribute, CUfunction function) {
    *out = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 32
                                                                : 0;
    return CUDA_SUCCESS;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->ptxVersion = out->binaryVersion = settings.card.major * 10 + settings.card.minor;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *f, int threads,
                                                                   size_t shared, unsigned flags) {
    *out = 2;
    return cudaSuccess;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction f, int threads, size_t shared) {
    *out = 2;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *out, CUfunction f, const CUlaunchConfig *how) {
    *out = 1;
    return CUDA_SUCCESS;
}
