// nvidia-smi of the device: `-L`, and --query-gpu of name, driver_version, memory.total, uuid, index.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int nvmlDeviceGetCount_v2(unsigned *);
int nvmlDeviceGetHandleByIndex_v2(unsigned, void **);
int nvmlDeviceGetName(void *, char *, unsigned);
int nvmlDeviceGetUUID(void *, char *, unsigned);
int nvmlSystemGetDriverVersion(char *, unsigned);
int nvmlDeviceGetMemoryInfo(void *, unsigned long long *);

static void print_field(const char *field, unsigned index, void *gpu) {
    char text[128] = "[N/A]";
    unsigned long long memory[3];
    if (!strcmp(field, "name"))
        nvmlDeviceGetName(gpu, text, sizeof text);
    else if (!strcmp(field, "uuid"))
        nvmlDeviceGetUUID(gpu, text, sizeof text);
    else if (!strcmp(field, "driver_version"))
        nvmlSystemGetDriverVersion(text, sizeof text);
    else if (!strcmp(field, "index"))
        snprintf(text, sizeof text, "%u", index);
    else if (!strcmp(field, "memory.total") && !nvmlDeviceGetMemoryInfo(gpu, memory))
        snprintf(text, sizeof text, "%llu MiB", memory[0] >> 20);
    printf("%s", text);
}

int main(int argc, char **argv) {
    char query[512] = "";
    for (int i = 1; i < argc; i++)
        if (!strncmp(argv[i], "--query-gpu=", 12))
            snprintf(query, sizeof query, "%s", argv[i] + 12);
    unsigned count = 0;
    nvmlDeviceGetCount_v2(&count);
    for (unsigned i = 0; i < count; i++) {
        void *gpu;
        char name[128], uuid[128], fields[512];
        if (nvmlDeviceGetHandleByIndex_v2(i, &gpu)) {
            printf("Unable to determine the device handle for GPU%u: GPU is lost\n", i);
            continue;
        }
        nvmlDeviceGetName(gpu, name, sizeof name);
        nvmlDeviceGetUUID(gpu, uuid, sizeof uuid);
        if (!*query) {
            printf("GPU %u: %s (UUID: %s)\n", i, name, uuid);
            continue;
        }
        strcpy(fields, query);
        int nth = 0;
        for (char *field = strtok(fields, ","); field; field = strtok(NULL, ",")) {
            printf("%s", nth++ ? ", " : "");
            print_field(field, i, gpu);
        }
        printf("\n");
    }
    return count ? 0 : 9;
}
