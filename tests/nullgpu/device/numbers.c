// Arithmetic of collectives: whole numbers as 64 bits, all others in double precision.
#include "numbers.h"
#include <nccl.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

size_t number_bytes(int type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    default: return 4;
    }
}

static double widened(uint16_t bits, int type) {
    uint32_t wide;
    float value;
    if (type == ncclBfloat16) {
        wide = (uint32_t)bits << 16;
        memcpy(&value, &wide, sizeof value);
        return value;
    }
    _Float16 half;
    memcpy(&half, &bits, sizeof half);
    return (double)half;
}

static uint16_t narrowed(double value, int type) {
    uint16_t bits;
    if (type == ncclBfloat16) {
        float single = (float)value;
        uint32_t wide;
        memcpy(&wide, &single, sizeof wide);
        if (value != value)
            return 0x7fc0;
        return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16); // to the nearest, ties to even
    }
    _Float16 half = (_Float16)value;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

static double real_at(const char *at, int type) {
    float single;
    double wide;
    uint16_t bits;
    switch (type) {
    case ncclFloat16:
    case ncclBfloat16: memcpy(&bits, at, sizeof bits); return widened(bits, type);
    case ncclFloat64: memcpy(&wide, at, sizeof wide); return wide;
    default: memcpy(&single, at, sizeof single); return single;
    }
}

static void put_real(char *at, double value, int type) {
    float single = (float)value;
    uint16_t bits;
    switch (type) {
    case ncclFloat16:
    case ncclBfloat16:
        bits = narrowed(value, type);
        memcpy(at, &bits, sizeof bits);
        break;
    case ncclFloat64: memcpy(at, &value, sizeof value); break;
    default: memcpy(at, &single, sizeof single);
    }
}

static int64_t whole_at(const char *at, int type) {
    int64_t wide = 0;
    int32_t word;
    switch (type) {
    case ncclInt8: return (int8_t)*at;
    case ncclUint8: return (uint8_t)*at;
    case ncclInt32: memcpy(&word, at, sizeof word); return word;
    default: memcpy(&wide, at, number_bytes(type)); return wide;
    }
}

static bool is_whole(int type) { return type <= ncclUint64; }

static double combined(double one, double other, int reduction) {
    switch (reduction) {
    case ncclProd: return one * other;
    case ncclMax: return one > other ? one : other;
    case ncclMin: return one < other ? one : other;
    default: return one + other;
    }
}

static int64_t combined_whole(int64_t one, int64_t other, int reduction) {
    switch (reduction) {
    case ncclProd: return one * other;
    case ncclMax: return one > other ? one : other;
    case ncclMin: return one < other ? one : other;
    default: return (int64_t)((uint64_t)one + (uint64_t)other);
    }
}

void numbers_reduce(char *out, const char *in, size_t stride, int ranks, size_t elements, int type,
                    int reduction) {
    size_t width = number_bytes(type);
    for (size_t i = 0; i < elements; i++) {
        const char *at = in + i * width;
        if (is_whole(type)) {
            int64_t sum = whole_at(at, type);
            for (int rank = 1; rank < ranks; rank++)
                sum = combined_whole(sum, whole_at(at + (size_t)rank * stride, type), reduction);
            if (reduction == ncclAvg)
                sum /= ranks;
            memcpy(out + i * width, &sum, width);
            continue;
        }
        double sum = real_at(at, type);
        for (int rank = 1; rank < ranks; rank++)
            sum = combined(sum, real_at(at + (size_t)rank * stride, type), reduction);
        put_real(out + i * width, reduction == ncclAvg ? sum / ranks : sum, type);
    }
}
