// Copies: those of at most NULLGPU_COPY bytes are made, at once. Each is counted with its direction, and one
// after which the host goes on only when it is done counts as a wait too.
#include "null.h"
#include <string.h>

static const char *direction(const void *to, const void *from) {
    bool into = is_device(to), out_of = is_device(from);
    if (into && out_of)
        return "device to device";
    if (into)
        return is_pinned(from) ? "host to device" : "pageable to device";
    if (out_of)
        return is_pinned(to) ? "device to host" : "device to pageable";
    return "host to host";
}

static void counted(void *to, const void *from, size_t bytes) {
    count("copy", direction(to, from), bytes);
    copy(to, from, bytes);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    if (!is_device(to) || !is_device(from))
        count_wait("cudaMemcpy");
    counted(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
    bool to_pageable = is_device(from) && !is_device(to) && !is_pinned(to);
    if (to_pageable && is_capturing(stream))
        return failed(cudaErrorStreamCaptureUnsupported);
    if (to_pageable)
        count_wait("cudaMemcpyAsync to pageable memory");
    counted(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    count("copy", direction(to, from), width * height);
    for (size_t row = 0; row < height; row++)
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int d, const void *from, int s, size_t bytes, cudaStream_t stream) {
    counted(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemset(void *at, int value, size_t bytes) {
    count("launch", "cudaMemset", bytes);
    // Zeros in pages that nobody wrote are there already; what is long is left out like a copy.
    if (bytes <= settings.copy_bytes)
        memset(at, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream) {
    return cudaMemset(at, value, bytes);
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t bytes) {
    count_wait("cuMemcpyDtoH");
    counted(to, (void *)from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes) {
    count_wait("cuMemcpyHtoD");
    counted((void *)to, from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    counted((void *)to, from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return cudaMemcpyAsync(to, (void *)from, bytes, cudaMemcpyDeviceToHost, stream)
               ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
               : CUDA_SUCCESS;
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    counted((void *)to, (void *)from, bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    counted((void *)to, (void *)from, bytes);
    return CUDA_SUCCESS;
}
