// Ranks of one communicator meet in shared memory: world.c; what they exchange there: nccl.c.
#pragma once
#include "null.h"

#define SLOT_BYTES (1 << 20) // of one rank, in one round of a collective
#define BOX_BYTES (1 << 16)  // of one message between two ranks
#define MOST_RANKS 64

// What a rank is about to do. All ranks of a collective must say the same.
struct said {
    char operation[24];
    size_t elements;
    int type, reduction, root;
};

struct box {
    atomic_int full;
    size_t bytes;
    char data[BOX_BYTES];
};

struct shared {
    atomic_int arrived, round, broken;
    char why[256];
    atomic_ulong done[MOST_RANKS]; // collectives of each rank
    struct said said[MOST_RANKS];
};

struct world {
    char name[64];
    int ranks, rank, device;
    unsigned long collectives;
    int children;          // communicators that were split from it
    struct shared *shared; // NULL: a world of one, or of ranks that are only believed in
    char *slots;           // ranks x SLOT_BYTES
    struct box *boxes;     // from x to
};

struct world *world_open(const char *name, int ranks, int rank);
void world_close(struct world *world);
bool world_meet(struct world *world);                           // a barrier; false: somebody did not come
bool world_fail(struct world *world, const char *format, ...);  // says why, to all; returns false
bool world_agree(struct world *world, const struct said *said); // whether all ranks do the same
const char *world_error(void);

static inline char *world_slot(struct world *world, int rank) {
    return world->slots + (size_t)rank * SLOT_BYTES;
}
static inline struct box *world_box(struct world *w, int from, int to) {
    return w->boxes + (size_t)from * w->ranks + to;
}
