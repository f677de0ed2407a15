// The device's description, from the environment.
#include "null.h"
#include <stdlib.h>
#include <string.h>

static const struct card cards[] = {
    {"H100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 80, 228, 50, 18},
    {"H200", "NVIDIA H200", 9, 0, 132, 141, 228, 60, 18},
    {"A100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 80, 164, 40, 12},
    {"A100-40GB", "NVIDIA A100-SXM4-40GB", 8, 0, 108, 40, 164, 40, 12},
    {"L40S", "NVIDIA L40S", 8, 9, 142, 48, 100, 96, 0},
    {"B200", "NVIDIA B200", 10, 0, 148, 180, 228, 126, 18},
};

struct settings settings;

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

static const char *text_of(const char *name, const char *otherwise) {
    const char *text = getenv(name);
    return text && *text ? text : otherwise;
}

__attribute__((constructor(101))) static void read_settings(void) {
    const char *wanted = text_of("NULLGPU_CARD", "H100");
    settings.card = cards[0];
    for (size_t i = 0; i < sizeof cards / sizeof *cards; i++)
        if (!strcmp(cards[i].key, wanted))
            settings.card = cards[i];
    settings.devices = (int)number("NULLGPU_DEVICES", 1);
    if (settings.devices > MOST_DEVICES)
        settings.devices = MOST_DEVICES;
    settings.cuda = (int)number("NULLGPU_CUDA", 13000);
    settings.driver = text_of("NULLGPU_DRIVER", "580.159.04");
    settings.memory_bytes = (size_t)number("NULLGPU_GIB", settings.card.gib) << 30;
    settings.copy_bytes = (size_t)number("NULLGPU_COPY", 64 << 20);
    settings.faults = text_of("NULLGPU_FAULTS", "");
    settings.record = text_of("NULLGPU_RECORD", NULL);
    settings.callers = number("NULLGPU_CALLERS", 0) != 0;
    settings.alone = !strcmp(text_of("NULLGPU_NCCL", ""), "alone");
    settings.patience_s = (int)number("NULLGPU_PATIENCE_S", 300);
}

long fault(const char *kind, int device, long otherwise) {
    size_t length = strlen(kind);
    for (const char *at = settings.faults; at && *at; at = strchr(at, ',')) {
        at += *at == ',';
        char *end;
        if (strncmp(at, kind, length) || at[length] != '@')
            continue;
        if (strtol(at + length + 1, &end, 10) != device)
            continue;
        return *end == '=' ? strtol(end + 1, NULL, 0) : 1;
    }
    return otherwise;
}
