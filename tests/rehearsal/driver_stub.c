/* What vLLM's and torch's libraries name of CUDA's driver, so that they load without one. Every call fails. */
#define FAILS(name) int name() { return 100; }
FAILS(cuGetProcAddress_v2) FAILS(cuGetProcAddress) FAILS(cuPointerGetAttribute) FAILS(cuTensorMapEncodeTiled)
FAILS(cuTensorMapEncodeIm2col) FAILS(cuCtxGetCurrent) FAILS(cuCtxSetCurrent) FAILS(cuCtxGetDevice)
FAILS(cuCtxSynchronize) FAILS(cuDeviceGetAttribute) FAILS(cuDevicePrimaryCtxRetain)
FAILS(cuDevicePrimaryCtxRelease) FAILS(cuDeviceGet) FAILS(cuDeviceGetCount) FAILS(cuDeviceGetName)
FAILS(cuGetErrorString) FAILS(cuGetErrorName) FAILS(cuMemAddressFree) FAILS(cuMemAddressReserve)
FAILS(cuMemCreate) FAILS(cuMemGetAllocationGranularity) FAILS(cuMemMap) FAILS(cuMemRelease) FAILS(cuMemSetAccess)
FAILS(cuMemUnmap) FAILS(cuMemAllocAsync) FAILS(cuMemcpyHtoDAsync_v2) FAILS(cuInit) FAILS(cuDriverGetVersion)
FAILS(cuLaunchKernel) FAILS(cuLaunchKernelEx) FAILS(cuModuleLoadData) FAILS(cuModuleGetFunction)
FAILS(cuModuleUnload) FAILS(cuStreamGetCaptureInfo_v2) FAILS(cuStreamSynchronize) FAILS(cuFuncSetAttribute)
FAILS(cuFuncGetAttribute) FAILS(cuLibraryLoadData) FAILS(cuLibraryGetKernel) FAILS(cuOccupancyMaxActiveClusters)
