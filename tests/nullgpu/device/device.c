// What the device says of itself, by the runtime and by the driver.
#define _GNU_SOURCE
#include "null.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static bool exists(int device) { return device >= 0 && device < settings.devices; }

cudaError_t cudaGetDeviceCount(int *out) {
    *out = settings.devices;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *out) {
    *out = current_device();
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (!exists(device))
        return failed(cudaErrorInvalidDevice);
    select_device(device);
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *out) {
    *out = settings.cuda;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *out) {
    *out = CUDART_VERSION;
    return cudaSuccess;
}

static void uuid_of(int device, char *out) {
    memset(out, 0, 16);
    out[15] = (char)(device + 1);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
    if (!exists(device))
        return failed(cudaErrorInvalidDevice);
    const struct card *card = &settings.card;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s", card->name);
    uuid_of(device, out->uuid.bytes);
    out->totalGlobalMem = settings.memory_bytes;
    out->major = card->major;
    out->minor = card->minor;
    out->multiProcessorCount = card->processors;
    out->warpSize = 32;
    out->maxThreadsPerBlock = 1024;
    out->maxThreadsPerMultiProcessor = 2048;
    out->maxBlocksPerMultiProcessor = 32; // torch.topk divides by it where the vocabulary is a true one
    out->sharedMemPerBlock = 48 << 10;
    out->sharedMemPerBlockOptin = (size_t)(card->shared_kib - 1) << 10;
    out->sharedMemPerMultiprocessor = (size_t)card->shared_kib << 10;
    out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->l2CacheSize = card->l2_mib << 20;
    out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
    out->maxThreadsDim[2] = 64;
    out->maxGridSize[0] = 2147483647;
    out->maxGridSize[1] = out->maxGridSize[2] = 65535;
    out->textureAlignment = 512;
    out->unifiedAddressing = out->canMapHostMemory = out->concurrentKernels = 1;
    out->cooperativeLaunch = out->hostRegisterSupported = 1;
    out->pciBusID = device + 1;
    out->memoryBusWidth = 5120;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int device) {
    const struct card *card = &settings.card;
    switch ((int)attribute) {
    case cudaDevAttrComputeCapabilityMajor: *out = card->major; break;
    case cudaDevAttrComputeCapabilityMinor: *out = card->minor; break;
    case cudaDevAttrMultiProcessorCount: *out = card->processors; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = (card->shared_kib - 1) << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *out = card->shared_kib << 10; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *out = 2048; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *out = 32; break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *out = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *out = 64; break;
    case cudaDevAttrWarpSize: *out = 32; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *out = 65536; break;
    case cudaDevAttrMaxGridDimX: *out = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *out = 65535; break;
    case cudaDevAttrL2CacheSize: *out = card->l2_mib << 20; break;
    case cudaDevAttrClockRate: *out = 1980000; break;
    case cudaDevAttrMemoryClockRate: *out = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *out = 5120; break;
    case cudaDevAttrPciBusId: *out = device + 1; break;
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrMemoryPoolsSupported: *out = 1; break;
    // The driver's own attribute: expandable segments ask whether virtual memory is managed.
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *out = 1; break;
    default: *out = 0;
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *out, int device, int peer) {
    *out = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *out, int room, int device) {
    snprintf(out, room, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *out, int device) {
    static int pools[MOST_DEVICES];
    *out = (cudaMemPool_t)&pools[device];
    return cudaSuccess;
}

const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError of the null device";
}

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorHostMemoryAlreadyRegistered:
        return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    default: return "an error of the null device";
    }
}

// --- the driver

CUresult cuInit(unsigned flags) { return settings.devices ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }

CUresult cuDriverGetVersion(int *out) {
    *out = settings.cuda;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *out) {
    *out = settings.devices;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *out, int ordinal) {
    *out = ordinal;
    return exists(ordinal) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *out, int room, CUdevice device) {
    snprintf(out, room, "%s", settings.card.name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *out, CUdevice device) {
    uuid_of(device, out->bytes);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *out, CUdevice device) {
    *out = settings.memory_bytes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *out, CUdevice_attribute attribute, CUdevice device) {
    cudaDeviceGetAttribute(out, (enum cudaDeviceAttr)attribute, device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
    *major = settings.card.major;
    *minor = settings.card.minor;
    return CUDA_SUCCESS;
}

static int contexts[MOST_DEVICES];

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    *out = (CUcontext)&contexts[device];
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *out) { return cuDevicePrimaryCtxRetain(out, current_device()); }
CUresult cuCtxPopCurrent(CUcontext *out) { return cuDevicePrimaryCtxRetain(out, current_device()); }

CUresult cuCtxSetCurrent(CUcontext context) {
    ptrdiff_t device = (int *)context - contexts;
    if (context && device >= 0 && device < MOST_DEVICES)
        select_device((int)device);
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxSetCurrent(context); }

CUresult cuCtxGetDevice(CUdevice *out) {
    *out = current_device();
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **out) {
    *out = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR of the null device";
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **out) {
    *out = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the null device";
    return CUDA_SUCCESS;
}

// No table of functions that NVIDIA does not document.
CUresult cuGetExportTable(const void **out, const CUuuid *which) {
    *out = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

// --- addresses of the driver's functions

static int nothing(void) { return 0; }

static void *entry(const char *name) {
    char versioned[160];
    for (int version = 4; version >= 2; version--) {
        snprintf(versioned, sizeof versioned, "%s_v%d", name, version);
        void *found = dlsym(RTLD_DEFAULT, versioned);
        if (found)
            return found;
    }
    void *found = dlsym(RTLD_DEFAULT, name);
    if (!found)
        count("call", name, 0);
    return found ? found : (void *)nothing;
}

#undef cuGetProcAddress
CUresult cuGetProcAddress_v2(const char *name, void **out, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult *r) {
    *out = entry(name);
    if (r)
        *r = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char *name, void **out, int version, cuuint64_t flags) {
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    *out = entry(name);
    if (result)
        *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
