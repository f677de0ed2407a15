// NVML: what the machine's GPUs say of their health. NULLGPU_FAULTS lists what is wrong, as KIND@GPU[=VALUE]:
//   ecc@3=2      uncorrectable memory errors        remap-pending@2, remap-failed@2   rows of memory
//   link@1=17    this NVLink is down                pcie@4=8      lanes of 16
//   slow@0=64    bits of the clocks' event reasons  hot@5=95      degrees Celsius
//   busy@0=4242  a process of somebody else         model@2       another kind of card
//   gone@7       fallen off the bus                 mute@6        every reading is refused
// NVML's driver version is the kernel module's (NULLGPU_DRIVER); its CUDA version is libcuda's
// (NULLGPU_CUDA).
#include "null.h"
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, NO_PERMISSION = 4, LOST = 15, INVALID = 2 };
typedef void *gpu;

static int index_of(gpu handle) { return (int)(uintptr_t)handle - 1; }

static int trouble(gpu handle) {
    if (fault("gone", index_of(handle), 0))
        return LOST;
    return fault("mute", index_of(handle), 0) ? NO_PERMISSION : SUCCESS;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int error) {
    switch (error) {
    case SUCCESS: return "Success";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case LOST: return "GPU is lost";
    default: return "Invalid Argument";
    }
}

// --- the machine

int nvmlSystemGetDriverVersion(char *out, unsigned room) {
    snprintf(out, room, "%s", settings.driver);
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion(int *out) {
    *out = settings.cuda;
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }

int nvmlSystemGetNVMLVersion(char *out, unsigned room) {
    snprintf(out, room, "13.%s", settings.driver);
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *out) {
    *out = (unsigned)settings.devices;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu *out) {
    *out = (gpu)(uintptr_t)(index + 1);
    if (index >= (unsigned)settings.devices)
        return INVALID;
    return fault("gone", (int)index, 0) ? LOST : SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, gpu *out) {
    unsigned last = 0;
    sscanf(uuid, "GPU-00000000-0000-0000-0000-%x", &last);
    return last ? nvmlDeviceGetHandleByIndex_v2(last - 1, out) : NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, gpu *out) {
    unsigned domain, number = 0;
    sscanf(bus, "%x:%x", &domain, &number);
    return number ? nvmlDeviceGetHandleByIndex_v2(number - 1, out) : NOT_FOUND;
}

// --- one GPU

int nvmlDeviceGetIndex(gpu handle, unsigned *out) {
    *out = (unsigned)index_of(handle);
    return SUCCESS;
}

int nvmlDeviceGetMinorNumber(gpu handle, unsigned *out) { return nvmlDeviceGetIndex(handle, out); }

int nvmlDeviceGetName(gpu handle, char *out, unsigned room) {
    bool other = fault("model", index_of(handle), 0) != 0;
    snprintf(out, room, "%s", other ? "NVIDIA A100-PCIE-40GB" : settings.card.name);
    return trouble(handle);
}

int nvmlDeviceGetUUID(gpu handle, char *out, unsigned room) {
    snprintf(out, room, "GPU-00000000-0000-0000-0000-%012x", index_of(handle) + 1);
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(gpu handle, int *major, int *minor) {
    *major = settings.card.major;
    *minor = settings.card.minor;
    return SUCCESS;
}

struct memory {
    unsigned long long total, free, used;
};

int nvmlDeviceGetMemoryInfo(gpu handle, struct memory *out) {
    out->total = settings.memory_bytes;
    out->used = used_bytes(index_of(handle));
    out->free = out->total - out->used;
    return trouble(handle);
}

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo_v2(gpu handle, struct memory_v2 *out) {
    out->total = settings.memory_bytes;
    out->reserved = 0;
    out->used = used_bytes(index_of(handle));
    out->free = out->total - out->used;
    return trouble(handle);
}

struct pci {
    char old_bus[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(gpu handle, struct pci *out) {
    memset(out, 0, sizeof *out);
    out->bus = (unsigned)index_of(handle) + 1;
    snprintf(out->old_bus, sizeof out->old_bus, "0000:%02X:00.0", out->bus);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
    return SUCCESS;
}

struct utilization {
    unsigned gpu, memory;
};

int nvmlDeviceGetUtilizationRates(gpu handle, struct utilization *out) {
    out->gpu = out->memory = 0;
    return trouble(handle);
}

int nvmlDeviceGetPowerUsage(gpu handle, unsigned *milliwatts) {
    *milliwatts = 70000;
    return trouble(handle);
}

// --- health

int nvmlDeviceGetTotalEccErrors(gpu handle, int kind, int since, unsigned long long *out) {
    *out = (unsigned long long)fault("ecc", index_of(handle), 0);
    return trouble(handle);
}

int nvmlDeviceGetRemappedRows(gpu handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failure) {
    *corrected = *uncorrected = 0;
    *pending = fault("remap-pending", index_of(handle), 0) != 0;
    *failure = fault("remap-failed", index_of(handle), 0) != 0;
    return trouble(handle);
}

int nvmlDeviceGetNvLinkState(gpu handle, unsigned link, unsigned *out) {
    if (link >= (unsigned)settings.card.links)
        return NOT_SUPPORTED;
    *out = fault("link", index_of(handle), -1) != (long)link;
    return trouble(handle);
}

int nvmlDeviceGetNvLinkVersion(gpu handle, unsigned link, unsigned *out) {
    *out = 4;
    return link < (unsigned)settings.card.links ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(gpu handle, unsigned link, unsigned *out) {
    *out = 2; // a switch
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(gpu handle, unsigned link, void *out) { return NOT_SUPPORTED; }

struct fabric {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
};

// No fabric of several nodes.
int nvmlDeviceGetGpuFabricInfoV(gpu handle, struct fabric *out) {
    out->status = SUCCESS;
    out->state = 0;
    return SUCCESS;
}

int nvmlDeviceGetP2PStatus(gpu one, gpu other, int which, int *out) {
    *out = 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkWidth(gpu handle, unsigned *out) {
    *out = 16;
    return trouble(handle);
}

int nvmlDeviceGetCurrPcieLinkWidth(gpu handle, unsigned *out) {
    *out = (unsigned)fault("pcie", index_of(handle), 16);
    return trouble(handle);
}

int nvmlDeviceGetMaxPcieLinkGeneration(gpu handle, unsigned *out) {
    *out = settings.card.major >= 9 ? 5 : 4;
    return trouble(handle);
}

int nvmlDeviceGetCurrentClocksEventReasons(gpu handle, unsigned long long *out) {
    *out = (unsigned long long)fault("slow", index_of(handle), 1); // 1: idle
    return trouble(handle);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(gpu handle, unsigned long long *out) {
    return nvmlDeviceGetCurrentClocksEventReasons(handle, out);
}

int nvmlDeviceGetTemperature(gpu handle, int sensor, unsigned *out) {
    *out = (unsigned)fault("hot", index_of(handle), 34);
    return trouble(handle);
}

struct temperature {
    unsigned version;
    int sensor, celsius;
};

int nvmlDeviceGetTemperatureV(gpu handle, struct temperature *out) {
    out->celsius = (int)fault("hot", index_of(handle), 34);
    return trouble(handle);
}

int nvmlDeviceGetTemperatureThreshold(gpu handle, int which, unsigned *out) {
    *out = 97;
    return trouble(handle);
}

struct process {
    unsigned pid;
    unsigned long long bytes;
    unsigned instance, compute_instance;
};

int nvmlDeviceGetComputeRunningProcesses_v3(gpu handle, unsigned *n, struct process *out) {
    long pid = fault("busy", index_of(handle), 0);
    unsigned room = *n;
    *n = pid ? 1 : 0;
    if (!pid)
        return trouble(handle);
    if (!room || !out)
        return 7; // the caller asks again with room
    *out = (struct process){.pid = (unsigned)pid, .bytes = 1 << 30};
    return trouble(handle);
}

// The first form, which torch asks for in a report of too little memory, has shorter rows.
int nvmlDeviceGetComputeRunningProcesses(gpu handle, unsigned *n, void *out) {
    *n = 0;
    return trouble(handle);
}
