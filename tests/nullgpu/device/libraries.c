// cuBLAS, where an answer decides which way torch takes. Their other functions are stubs (../stubs.py).
#include "null.h"
#include <cublasLt.h>

cublasStatus_t cublasGetVersion_v2(cublasHandle_t handle, int *out) {
    *out = CUBLAS_VERSION;
    return CUBLAS_STATUS_SUCCESS;
}

// One way to multiply is found; none would send torch to another path.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t out[], int *found) {
    out[0] = (cublasLtMatmulHeuristicResult_t){.state = CUBLAS_STATUS_SUCCESS, .wavesCount = 1};
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

size_t cudnnGetVersion(void) { return 92000; }
size_t cudnnGetCudartVersion(void) { return CUDART_VERSION; }
