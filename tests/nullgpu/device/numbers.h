// Arithmetic of collectives, on the host.
#pragma once
#include <stddef.h>

// Bytes of an element of an ncclDataType_t.
size_t number_bytes(int type);

// out[i] = the reduction over `ranks` arrays that begin `stride` bytes apart. A pre-multiplied sum is a sum.
void numbers_reduce(char *out, const char *in, size_t stride, int ranks, size_t elements, int type,
                    int reduction);
